"""How much memory a KV cache takes: pure arithmetic, shared by the engine and the planner.

The pool is block-major, `pool[block, layer, 2, kv_head, slot, head_dim]`, so one block of all
layers is one contiguous piece of memory (a transfer moves whole blocks).
"""

from dataclasses import dataclass

from twostroke.kv_messages import DTYPE_BYTES, row_bytes


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """What decides the size of a KV block on one tensor-parallel rank.

    With more ranks than KV heads each head is stored on several ranks, so a rank never holds less
    than one. A draft model's pool has blocks of the same ids: `draft_token_bytes` are its share.
    """

    num_layers: int
    num_kv_heads: int  # of the whole model
    head_dim: int
    dtype: str = "bfloat16"
    block_size: int = 16
    tensor_parallel_size: int = 1
    draft_token_bytes: int = 0

    @property
    def kv_heads_per_rank(self) -> int:
        return max(1, -(-self.num_kv_heads // self.tensor_parallel_size))

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """(layer, 2, kv_head, slot, elements of a row) of one block on one rank."""
        elements = row_bytes(self.dtype, self.head_dim) // DTYPE_BYTES[self.dtype]
        return (self.num_layers, 2, self.kv_heads_per_rank, self.block_size, elements)

    @property
    def token_bytes(self) -> int:
        """Bytes of the model's KV per token and rank, over all layers."""
        per_layer = 2 * self.kv_heads_per_rank * row_bytes(self.dtype, self.head_dim)
        return self.num_layers * per_layer

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers on one rank, with the draft model's."""
        return (self.token_bytes + self.draft_token_bytes) * self.block_size

    def blocks_in(self, memory_bytes: int) -> int:
        """Whole blocks that fit into `memory_bytes` of one rank."""
        return memory_bytes // self.block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request take."""
        return -(-num_tokens // self.block_size)
