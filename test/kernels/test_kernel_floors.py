"""The table of FLOPs and bytes against counts made by hand."""

import pytest

pytest.importorskip("torch")

from canopy_kernel import floors
from canopy_kernel.floors import Heads

SMALL = Heads(4, 2, 16, 2)


def test_the_floor_counts_visible_pairs_and_every_byte_once():
    cost = floors.attention_floor([[0, 3]], [5], SMALL)
    assert cost.flops == 4 * 4 * 16 * (1 + 4)  # two products, 2 FLOPs each, of 4 heads
    assert cost.bytes == 2 * (2 * 2 * 4 * 16 + 2 * 5 * 2 * 16)


def test_a_tile_pays_for_its_mask_and_every_tile_reads_its_keys():
    """128 rows are 64 queries of 2 heads: one tile of each KV head, all keys up to the last."""
    rows = [list(range(0, 128, 2))]
    cost = floors.attention_tiles(rows, [128], SMALL, programs=1)
    assert cost.flops == 2 * 4 * 128 * 128 * 16
    assert cost.bytes == 2 * 2 * (128 * 16 * 2 + 2 * 127 * 16)
    alone = floors.attention_one_head_a_tile(rows, SMALL, repeated=1.0)
    assert alone.flops == cost.flops  # as many rows in all
    assert alone.bytes - cost.bytes == 2 * 2 * (2 * 127 * 16)  # but each head reads the keys


def test_parts_cost_their_writing_and_merging_but_no_matrix_work():
    rows = [[4095]]
    whole = floors.attention_tiles(rows, [4096], SMALL, programs=1)
    split = floors.attention_tiles(rows, [4096], SMALL, programs=64)
    assert split.bytes > whole.bytes
    assert split.flops - whole.flops == 2 * 2 * 8 * 2 * 16  # the merge of 8 parts of 2 rows


def test_decomposition_and_tiles_cover_the_same_pairs():
    rows = [list(range(0, 4096, 6))]
    of = Heads()
    floor = floors.attention_floor(rows, [4096], of)
    apart = floors.attention_decomposed(rows, of, 64)
    assert floor.flops < apart.flops < 1.5 * floor.flops


def test_blocks_of_64_leave_half_of_a_tile_that_packs_no_heads_empty():
    rows, of = [list(range(8192, 8192 + 128))], Heads()
    packed = floors.attention_decomposed(rows, of, 64)
    small = floors.attention_decomposed(rows, of, 64, packed=False)
    whole = floors.attention_decomposed(rows, of, 128, packed=False)
    assert small.flops > 1.9 * packed.flops
    assert whole.flops < 1.05 * packed.flops


def test_no_kernel_is_below_its_floor_and_new_tiles_beat_the_old():
    of = Heads()
    rows = [sorted({(7 * i * i) % 4096 for i in range(700)})]
    floor = floors.attention_floor(rows, [4096], of)
    new = floors.attention_tiles(rows, [4096], of)
    old = floors.attention_one_head_a_tile(rows, of)
    assert floor.flops < new.flops < old.flops
    assert floor.bytes < new.bytes < old.bytes
    assert (
        floors.rope_scatter_joined(100, of).bytes > 1.9 * floors.rope_scatter_floor(100, of).bytes
    )


def test_the_roofline_is_the_longer_of_both():
    assert floors.Cost(100.0, 10.0).seconds(10.0, 10.0) == 10.0
    assert floors.Cost(1.0, 100.0).seconds(10.0, 10.0) == 10.0
