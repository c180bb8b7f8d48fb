"""llama.cpp as a peer: runs in an environment of its own, with llama-cpp-python.

    python benchmarks/peers/llama_cpp.py FILE.gguf [--threads 2]      (driven over stdin and stdout)
    python benchmarks/peers/llama_cpp.py FILE.gguf --to-bf16 OUT.gguf

Decodes as llama.cpp's own batched benchmark does: all prompts are sequences of one context with one
KV cache, a step is one `llama_decode` over the next token of every sequence, a common prefix is
computed once and copied by reference, flash attention is on, and the choice is an argmax over the
logits, which costs less than any of its samplers.
"""

import argparse
import ctypes
import os
import sys
from itertools import takewhile

import llama_cpp as api
import numpy as np
from protocol import Job, serve

MAX_SEQUENCES = 256  # llama.cpp's own limit
CONTEXT_TOKENS = 32_768  # all cases fit at once
BATCH_TOKENS = 2_048
UBATCH_TOKENS = 512


class Llama:
    """One model and one context; sequences are forgotten after each job."""

    def __init__(self, path: str, threads: int) -> None:
        api.llama_backend_init()
        model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not model:
            sys.exit(f"llama.cpp could not load {path}")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        params = api.llama_context_default_params()
        params.n_ctx = CONTEXT_TOKENS
        params.n_batch = BATCH_TOKENS
        params.n_ubatch = UBATCH_TOKENS
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.no_perf = True
        self.context = api.llama_init_from_model(model, params)
        if not self.context:
            sys.exit("llama.cpp could not make a context")
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(self, job: Job) -> int:
        """Greedy, ignoring the end of text; returns how many tokens came out."""
        api.llama_memory_clear(self.memory, True)
        prompts = job.prompts
        chosen = [0] * len(prompts)
        shared = common_prefix(prompts)
        if shared:
            self._run([(prompts[0][i], i, 0, False) for i in range(shared)], chosen)
            for seq in range(1, len(prompts)):
                api.llama_memory_seq_cp(self.memory, 0, seq, 0, shared)
        rows = [
            (prompt[i], i, seq, i == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for i in range(shared, len(prompt))
        ]
        self._run(rows, chosen)
        for step in range(job.output_tokens - 1):
            next_rows = [
                (chosen[seq], len(prompt) + step, seq, True) for seq, prompt in enumerate(prompts)
            ]
            self._run(next_rows, chosen)
        return len(prompts) * job.output_tokens

    def _run(self, rows: list[tuple[int, int, int, bool]], chosen: list[int]) -> None:
        """Decode (token, position, sequence, is its logits wanted) rows; fills `chosen`."""
        for start in range(0, len(rows), BATCH_TOKENS):
            part = rows[start : start + BATCH_TOKENS]
            batch = self.batch
            batch.n_tokens = len(part)
            for i, (token, position, seq, wanted) in enumerate(part):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
                batch.logits[i] = wanted
            if api.llama_decode(self.context, batch) != 0:
                sys.exit("llama_decode failed")
            seqs = [seq for _, _, seq, wanted in part if wanted]
            if not seqs:
                api.llama_synchronize(self.context)
                continue
            logits = np.ctypeslib.as_array(
                api.llama_get_logits(self.context), shape=(len(seqs), self.vocab_size)
            )
            for seq, token in zip(seqs, logits.argmax(axis=1).tolist(), strict=True):
                chosen[seq] = token


def common_prefix(prompts: list[list[int]]) -> int:
    """Tokens that all prompts begin with; 0 for a single one."""
    if len(prompts) < 2:
        return 0
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def write_bf16(source: str, target: str) -> None:
    """The same weights as bf16."""
    params = api.llama_model_quantize_default_params()
    params.ftype = api.LLAMA_FTYPE_MOSTLY_BF16
    params.allow_requantize = True
    if api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) != 0:
        sys.exit(f"llama.cpp could not write {target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--to-bf16", metavar="OUT", default="")
    options = parser.parse_args()
    if options.to_bf16:
        write_bf16(options.model, options.to_bf16)
        return
    serve(lambda: Llama(options.model, options.threads).generate, api.__version__)


if __name__ == "__main__":
    main()
