"""OpenVINO GenAI as a peer: runs in an environment of its own, with openvino-genai.

Its continuous-batching pipeline reads the GGUF file itself; prompts are token ids. Its prefix cache
cannot be emptied, so each job's prompts begin with a token of the job's own.
"""

import argparse

import numpy as np
import openvino
import openvino_genai as genai
from protocol import Job, serve

POOL_GB = 1
MAX_SEQUENCES = 256
STEP_TOKENS = 4_096
FIRST_TOKEN_ID = 20  # below are special ones


class OpenVino:
    def __init__(self, path: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = POOL_GB
        scheduler.max_num_seqs = MAX_SEQUENCES
        scheduler.max_num_batched_tokens = STEP_TOKENS
        scheduler.enable_prefix_caching = True
        self.pipeline = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", {})
        self.next_id = self.jobs = 0

    def generate(self, job: Job) -> int:
        """Greedy, ignoring the end of text; returns how many tokens came out."""
        config = genai.GenerationConfig()
        config.max_new_tokens = job.output_tokens
        config.ignore_eos = True
        config.do_sample = False
        self.jobs += 1
        handles = []
        for prompt in job.prompts:
            own = [FIRST_TOKEN_ID + self.jobs, *prompt[1:]]
            tokens = openvino.Tensor(np.array([own], dtype=np.int64))
            handles.append(self.pipeline.add_request(self.next_id, tokens, config))
            self.next_id += 1
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return sum(len(handle.read_all()[0].generated_ids) for handle in handles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    options = parser.parse_args()
    serve(lambda: OpenVino(options.model).generate, genai.__version__)


if __name__ == "__main__":
    main()
