"""The attention kernel's work list, and the kernel over every kind of tile in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chip import move_to_chip

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from canopy_kernel import attention, tiles, triton_attention  # noqa: E402

REQUEST, FIRST_ROW, PART_INDEX, PART_COUNT, PARTIAL_RESULT = 0, 1, 4, 5, 6
"""Positions of the fields in a tile."""
request_sizes = st.lists(
    st.integers(0, 300).flatmap(lambda m: st.tuples(st.just(m), st.integers(m, 3000))),
    min_size=1,
    max_size=5,
)


@given(request_sizes, st.sampled_from([1, 3, 4, 7, 8]), st.sampled_from([16, 64, 128]))
def test_every_row_is_in_one_tile_and_every_part_has_a_place(sizes, heads_per_kv_head, block_m):
    counts, lengths = zip(*sizes)
    rows = []
    for launch in tiles.plan_launches(counts, lengths, heads_per_kv_head, block_m, 2, 64):
        for request, first, count, _, part, parts, _place, _ in launch.tiles.tolist():
            assert 0 < count <= launch.block_m
            assert part < parts
            if part == 0:
                rows += [(request, first + i) for i in range(count)]
        split = [tile for tile in launch.tiles.tolist() if tile[PART_COUNT] > 1]
        assert sorted(tile[PARTIAL_RESULT] for tile in split) == list(range(launch.parts))
        merged = [[m[0], m[1], m[2], m[4]] for m in launch.merges.tolist()]
        first_parts = [tile for tile in split if tile[PART_INDEX] == 0]
        assert sorted(merged) == sorted([*tile[:3], tile[PART_COUNT]] for tile in first_parts)
    expected = [(i, row) for i, (m, _) in enumerate(sizes) for row in range(m * heads_per_kv_head)]
    assert sorted(rows) == expected


def test_decode_rows_of_a_mixed_batch_have_small_tiles_of_their_own():
    large, small = tiles.plan_launches([400, 1, 1], [4000, 9000, 50], 4, 128, 8, 264)
    assert (large.block_m, small.block_m) == (128, tiles.SMALL_TILE_ROWS)
    assert {tile[REQUEST] for tile in large.tiles.tolist()} == {0}
    assert {tile[REQUEST] for tile in small.tiles.tolist()} >= {1, 2}


def test_the_longest_tiles_come_first():
    (launch,) = tiles.plan_launches([320, 64], [8000, 2000], 4, 128, 8, 64)
    assert launch.tiles[0].tolist()[:2] == [0, 9 * 128]  # the last rows of the longer request
    first = [tile[FIRST_ROW] for tile in launch.tiles.tolist() if tile[REQUEST] == 0]
    assert first == sorted(first, reverse=True)


def test_few_rows_are_split_until_the_chip_is_full_and_many_are_not():
    (few_rows,) = tiles.plan_launches([1], [32768], 4, 128, 8, 264)
    assert len(few_rows.tiles) == tiles.MAX_PARTS
    assert len(few_rows.tiles) * 8 <= 264 + 8
    (short_prompt,) = tiles.plan_launches([1], [700], 4, 128, 8, 264)
    assert len(short_prompt.tiles) == 2  # a part has hundreds of keys
    many_rows = tiles.plan_launches([9830], [65536], 4, 128, 8, 264)
    assert sum(launch.parts for launch in many_rows) == 0


def rows_of(sizes):
    slots = torch.randperm(sum(keys for _, keys in sizes) + 7)[: sum(keys for _, keys in sizes)]
    positions = [torch.randperm(keys)[:m].sort()[0] for m, keys in sizes]
    counts, lengths = (torch.tensor([0, *sizes_of]).cumsum(0).int() for sizes_of in zip(*sizes))
    return attention.Rows(torch.cat(positions), counts, slots, lengths, max(m for m, _ in sizes))


SIZES = {"mixed": [(75, 160), (1, 300), (1, 1), (0, 9)], "row": [(1, 600)], "question": [(9, 400)]}


@pytest.mark.parametrize(
    ("sizes", "group"),
    [
        pytest.param(name, group, marks=pytest.mark.long if (name, group) == ("mixed", 20) else ())
        for name in SIZES
        for group in (1, 3, 4, 20)
    ],
)
def test_tiles_whole_and_in_parts_are_the_dense_reference(sizes, group, monkeypatch):
    sizes = SIZES[sizes]
    monkeypatch.setattr(tiles, "MIN_PART_KEYS", 70)
    torch.manual_seed(group)
    rows, kv_heads, head_dim = rows_of(sizes), 2, 64
    q = torch.randn(sum(m for m, _ in sizes), kv_heads * group, head_dim, dtype=torch.float16)
    slots = int(rows.slots.max()) + 1
    k, v = (torch.randn(slots, 1, kv_heads, head_dim, dtype=torch.float16) for _ in range(2))
    q, k, v, rows = move_to_chip(q, k, v, rows)
    result = triton_attention.sparse_prefill_triton(q, k, v, rows, 0.125)
    expected = attention.reference(q, k, v, rows, 0.125)
    assert (result.float() - expected.float()).abs().max() < 4e-3
