"""Steps of many tokens as a program.

With more rows than `few_rows.MAX_ROWS` a product is bound by arithmetic, and no longer by reading
its weight: threads share the rows, and meet only where a token attends to others.

    rows: embed, norm, qkv, rotate ▶ attend ▶ rows: output ... norm, qkv, rotate ▶ attend ▶ ...
"""

from collections import Counter, defaultdict

from torch import Tensor

from twostroke.arrays import Int64s
from twostroke.model.elementwise import Kernels
from twostroke.model.llama import DecoderModel
from twostroke.model.program import Program
from twostroke.model.row_chunks import CHUNK_ROWS, RowChunks, Stage, chunks_of, chunks_with
from twostroke.worker.attention_numba import NumbaAttention
from twostroke.worker.step_calls import ROTATIONS, Call, Place, StepCalls
from twostroke.worker.step_programs import Buffers


class ManyRowsProgram:
    """Steps of up to as many tokens as `buffers` have room for, a chunk of rows on each thread."""

    def __init__(
        self,
        model: DecoderModel,
        attention: NumbaAttention,
        kernels: Kernels,
        capacity: int,
        *,
        few_bits: bool,
    ) -> None:
        """`few_bits`: with those weights that are kept in few bits."""
        num_threads = attention.num_threads
        self.max_tokens = capacity
        self.buffers = Buffers(model, capacity, CHUNK_ROWS, num_threads)
        self._attention = attention.program(self.buffers.qkv, self.buffers.attended)
        parts = StepCalls(model, self.buffers.places, kernels, few_bits=few_bits).layers()
        self._kinds = [[call.kind for call in part] for part in parts]
        self._chunks = [
            RowChunks([_stage(call) for call in part], num_threads, kernels.thread_num)
            for part in parts
        ]
        chunks = [chunks.call for chunks in self._chunks]
        calls = [call for pair in zip(chunks, self._attention.calls, strict=False) for call in pair]
        self._program = Program([*calls, chunks[-1]], num_threads)

    @property
    def num_threads(self) -> int:
        return self._program.num_threads

    def look_up_in(self, rotations: Tensor) -> None:
        """A table of each position's rotations."""
        self._chunks[0].set(*ROTATIONS, rotations.data_ptr())

    def kinds(self) -> Counter[str]:
        """How many kernels of each kind a step runs."""
        counts = Counter(kind for kinds in self._kinds for kind in kinds)
        return counts + Counter(attention=len(self._attention.calls))

    def run(
        self,
        num_tokens: int,
        num_threads: int,
        seconds_by_kind: defaultdict[str, float] | None,
        wanted: Int64s | None,
    ) -> None:
        """A step that the attention has planned; adds to `seconds_by_kind` where there is one.

        Of the last layer, what others than the `wanted` tokens do for themselves alone is left out.
        """
        self._attention.begin(wanted)
        every = chunks_of(num_tokens, num_threads)
        last = every if wanted is None else chunks_with(wanted, num_threads)
        for chunks in self._chunks:
            of_these = last if chunks is self._chunks[-1] else every
            chunks.begin(of_these, num_threads, timed=seconds_by_kind is not None)
        num_calls = 2 * len(self._chunks) - 1
        if seconds_by_kind is None:
            self._program.run(num_threads, num_calls)
            return
        times = self._program.run_timed(num_threads, num_calls).tolist()
        seconds_by_kind["attention"] += sum(times[1::2])
        for seconds, kinds, chunks in zip(times[::2], self._kinds, self._chunks, strict=True):
            for kind, share in zip(kinds, chunks.shares().tolist(), strict=True):
                seconds_by_kind[kind] += share * seconds


def _stage(call: Call) -> Stage:
    places = [word if isinstance(word, Place) else Place(word) for word in call.words]
    addresses, row_bytes, thread_bytes = zip(*places, strict=True)
    return Stage(call.address, call.rows, addresses, row_bytes, thread_bytes)
