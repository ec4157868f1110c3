"""Attention with scores by column against the dense reference, and where its range ends."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from canopy_kernel import attention, columns  # noqa: E402


def rows(n, m, heads, kv_heads, seed=0):
    generator = torch.Generator().manual_seed(seed)
    at = torch.randperm(n, generator=generator)[:m].sort()[0]
    q = torch.randn(m, heads, 16, generator=generator)
    k, v = (torch.randn(n, kv_heads, 16, generator=generator) for _ in range(2))
    return at, q, k, v


def dense(at, q, k, v, scale):
    found = attention.Rows.one(at, torch.arange(len(k)))
    return attention.reference(q, k[:, None], v[:, None], found, scale)


@pytest.mark.parametrize(
    ("n", "m", "heads", "kv_heads"),
    [(1, 1, 1, 1), (90, 90, 6, 2), (700, 130, 9, 3), (700, 33, 8, 1), (64, 0, 2, 2)],
)
@pytest.mark.parametrize("tile", [columns.TILE, 4096])
def test_attention_by_columns_is_the_dense_reference(monkeypatch, n, m, heads, kv_heads, tile):
    monkeypatch.setattr(columns, "TILE", tile)
    at, q, k, v = rows(n, m, heads, kv_heads)
    plan = columns.plan(at, heads // kv_heads)
    got = columns.attend(q, k, v, plan, 0.3)
    assert got.shape == q.shape
    assert torch.allclose(got, dense(at, q, k, v, 0.3), atol=1e-5)


@pytest.mark.parametrize("size", [1e-3, 60.0, 90.0, 400.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_of_any_size_are_right(size, sign):
    """All scores near ``size`` or its negative: beyond fp32's range the other path takes over."""
    at, q, k, v = rows(200, 40, 2, 1, seed=1)
    q[..., 0], k[..., 0] = sign * size, 1.0
    got = columns.attend(q, k, v, columns.plan(at, 2), 1.0)
    assert torch.allclose(got, dense(at, q, k, v, 1.0), atol=1e-3)


def test_what_lies_behind_a_query_does_not_matter_even_if_it_is_no_number():
    at, q, k, v = rows(200, 40, 2, 1, seed=2)
    last = int(at[-1])
    clean = columns.attend(q, k, v, columns.plan(at, 2), 0.3)
    k[last + 1 :], v[last + 1 :] = float("nan"), float("inf")
    assert torch.equal(columns.attend(q, k, v, columns.plan(at, 2), 0.3), clean)
