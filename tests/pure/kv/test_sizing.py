from twostroke.connector.layout import pool_bytes, record_of
from twostroke.kv.sizing import KvLayout

# Qwen3-30B-A3B on 8 ranks: 48 layers, 4 KV heads of 128, each stored on two ranks.
LAYOUT = KvLayout(num_layers=48, num_kv_heads=4, head_dim=128, tensor_parallel_size=8)


def test_bytes_of_a_token_and_a_block():
    assert LAYOUT.kv_heads_per_rank == 1
    assert LAYOUT.token_bytes == 24 * 1024
    assert LAYOUT.block_bytes == 384 * 1024
    assert LAYOUT.block_shape == (48, 2, 1, 16, 128)


def test_int8_has_a_scale_beside_each_row():
    layout = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="int8")
    assert layout.block_shape == (30, 2, 3, 16, 68)
    assert layout.token_bytes == 30 * 2 * 3 * 68
    record = record_of(layout, 9, "model")
    assert record.bytes_per_token == layout.token_bytes
    assert pool_bytes(record) == 9 * layout.block_bytes


def test_requests_that_a_pool_holds():
    blocks = LAYOUT.blocks_in(54 << 30)
    assert blocks // LAYOUT.blocks_for(8192) == 288
    assert 65_536 // 8192 == 8


def test_heads_are_split_over_ranks_and_rounded_up():
    layout = KvLayout(num_layers=2, num_kv_heads=6, head_dim=64, tensor_parallel_size=4)
    assert layout.kv_heads_per_rank == 2
    assert layout.blocks_for(17) == 2
