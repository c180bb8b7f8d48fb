"""transformers as a peer: a static batch in bf16, on a Hugging Face directory."""

import argparse

import torch
import transformers
from protocol import Job, serve


class Transformers:
    def __init__(self, path: str) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self.model = model.eval()

    def generate(self, job: Job) -> int:
        """Greedy, ignoring the end of text; returns how many tokens came out."""
        prompts = torch.tensor(job.prompts)
        with torch.inference_mode():
            answers = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=job.output_tokens,
                max_new_tokens=job.output_tokens,
                pad_token_id=0,
            )
        return answers[:, prompts.shape[1] :].numel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    options = parser.parse_args()
    serve(lambda: Transformers(options.model).generate, transformers.__version__)


if __name__ == "__main__":
    main()
