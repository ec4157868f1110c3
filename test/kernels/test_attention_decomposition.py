"""Attention by stock paged kernels over prefixes and masked spans, against the dense reference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.chip import on_chip

torch = pytest.importorskip("torch")

from canopy_kernel import attention, decomposition, triton_attention  # noqa: E402

WAYS = {
    "flashinfer": decomposition.paged_torch,
    "fa3": decomposition.paged_torch_table,
}


def chosen(draw, length):
    """Rows of a request of ``length`` tokens: none, all, next to each other, or any."""
    how = draw(st.sampled_from(["none", "all", "adjacent", "last", "any"]))
    if how == "none":
        return []
    if how == "all":
        return list(range(length))
    if how == "last":
        return [length - 1]
    if how == "adjacent":
        first = draw(st.integers(0, length - 1))
        return list(range(first, draw(st.integers(first + 1, length))))
    return sorted(draw(st.sets(st.integers(0, length - 1), max_size=length)))


@st.composite
def batches(draw):
    """(positions a request, lengths, page size, heads a KV head, queries a block)."""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    positions = [chosen(draw, n) for n in lengths]
    page = draw(st.sampled_from([1, 16, 64]))
    return positions, lengths, page, draw(st.sampled_from([1, 3, 4])), draw(st.integers(1, 40))


def build(positions, lengths, page, group, seed=0, dtype=torch.float32):
    """Requests whose pages are scattered over a pool, as a server's do."""
    torch.manual_seed(seed)
    kv_heads, dim = 2, 16
    pages = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(pages) + 3)
    slots, at = [], 0
    for n, count in zip(lengths, pages):
        own = order[at : at + count, None] * page + torch.arange(page)
        slots.append(own.flatten()[:n])
        at += count
    counts = [len(p) for p in positions]
    rows = attention.Rows(
        torch.tensor([p for row in positions for p in row], dtype=torch.long),
        torch.tensor([0, *counts]).cumsum(0).int(),
        torch.cat(slots),
        torch.tensor([0, *lengths]).cumsum(0).int(),
        max(counts),
    )
    k, v = (torch.randn(len(order), page, kv_heads, dim).to(dtype) for _ in range(2))
    return torch.randn(sum(counts), kv_heads * group, dim).to(dtype), k, v, rows


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@given(batch=batches())
def test_prefixes_and_spans_together_are_dense_attention(way, batch):
    *shape, size = batch
    q, k, v, rows = build(*shape)
    got = decomposition.decomposed(q, k, v, rows, 0.25, way, size)
    expected = attention.reference(q, k, v, rows, 0.25)
    assert torch.allclose(got, expected, atol=1e-5)


@given(batch=batches())
def test_pages_are_those_before_a_block_and_no_others(batch):
    positions, lengths, page, group, size = batch
    _, _, _, rows = build(positions, lengths, page, group)
    cut = decomposition.blocks(rows, page, size)
    lists, table = decomposition.page_lists(cut), decomposition.page_table(cut)
    starts = lists.starts.tolist()
    firsts = [(r, p[at]) for r, p in enumerate(positions) for at in range(0, len(p), size)]
    assert list(zip(cut.requests, cut.prefixes.tolist())) == firsts
    slots = [rows.slots[ks] for _, ks in rows.requests()]
    for i, (request, prefix) in enumerate(firsts):
        listed = lists.indices[starts[i] : starts[i + 1]]
        seen = (listed[:, None] * page + torch.arange(page)).flatten()[:prefix]
        assert torch.equal(seen, slots[request][:prefix])
        assert torch.equal(listed, table[i, : len(listed)])
        assert len(listed) * page - prefix == (page - int(lists.last_page[i]) if prefix else 0)
        assert prefix or int(lists.last_page[i]) == 0


@pytest.mark.parametrize("page", [1, 16])
def test_the_span_kernel_continues_from_the_stock_kernel(page):
    """The Triton kernel that joins both: interpreted, against the torch span."""
    pytest.importorskip("triton")
    positions = [sorted(torch.randperm(180)[:70].tolist()), [0], list(range(30, 60)), []]
    q, k, v, rows = on_chip(*build(positions, [180, 1, 90, 5], page, 3, dtype=torch.float16))
    expected = attention.reference(q, k, v, rows, 0.25)
    for way in WAYS.values():
        before = way(q, k, v, decomposition.blocks(rows, page, 24), 0.25)
        got = triton_attention.span_triton(q, k, v, rows, 0.25, 24, before)
        assert (got.float() - expected.float()).abs().max() < 4e-3


def test_long_prompts_get_larger_blocks():
    assert decomposition.block_size([600], [4096], 1) == decomposition.BLOCK
    size = decomposition.block_size([9830], [65536], 1)
    assert size > decomposition.BLOCK
    assert -(-9830 // size) * 65536 <= decomposition.MAX_PAGES
    assert decomposition.block_size([9830], [65536], 64) == decomposition.BLOCK


def test_positions_known_on_the_host_are_not_read_from_the_device():
    q, k, v, rows = build([[3, 9, 40]], [50], 1, 1)
    host = attention.Rows(
        rows.positions, rows.query_starts, rows.slots, rows.key_starts, 3, (3,), (50,),
        torch.tensor([3, 9, 40]),
    )  # fmt: skip
    found = [decomposition.page_lists(decomposition.blocks(r, 1, 2)) for r in (rows, host)]
    assert all(
        torch.equal(getattr(found[0], f), getattr(found[1], f)) for f in ("starts", "indices")
    )
    assert torch.equal(
        decomposition.decomposed(q, k, v, rows, 0.25), decomposition.decomposed(q, k, v, host, 0.25)
    )
