"""Our own side of the comparison, over the same lines as the peers."""

import argparse

from protocol import Job, serve

import twostroke


class Twostroke:
    def __init__(self, path: str, **settings: str) -> None:
        self.llm = twostroke.LLM(path, **settings)

    def generate(self, job: Job) -> int:
        """Greedy, ignoring the end of text; returns how many tokens came out."""
        self.llm.reset_prefix_cache()
        params = twostroke.SamplingParams(
            temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True
        )
        results = self.llm.generate(job.prompts, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    options = vars(parser.parse_args())
    serve(lambda: Twostroke(options.pop("model"), **options).generate, twostroke.__version__)


if __name__ == "__main__":
    main()
