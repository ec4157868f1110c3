"""Attention by halving on a CPU against the dense reference."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from canopy_kernel import attention, halves  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "positions",
    [
        [0],
        [699],
        list(range(700)),
        list(range(0, 700, 3)),
        [*range(10), *range(600, 700)],
        [*range(65), *range(300, 365), 699],
    ],
    ids=["first", "last", "all", "every-third", "ends", "runs"],
)
def test_attention_by_halves_is_the_dense_reference(positions, dtype) -> None:
    torch.manual_seed(0)
    at = torch.tensor(positions)
    q = torch.randn(len(positions), 6, 32).to(dtype)
    k, v = (torch.randn(700, 2, 32).to(dtype) for _ in range(2))
    rows = attention.Rows.one(at, torch.arange(700))
    expected = attention.reference(q, k[:, None], v[:, None], rows, 0.2)
    got = halves.attend(q, k, v, halves.plan(at, 3, dtype), 0.2)
    assert (got.float() - expected.float()).abs().max() < (1e-5 if q.dtype.itemsize == 4 else 3e-2)


def test_every_key_is_read_once_and_few_are_unused() -> None:
    at = torch.arange(0, 4000, 6)
    steps = halves.plan(at, 1, torch.float32)
    for row in (0, 100, 333, 666):
        mine = sorted((s.start, s.stop) for s in steps if s.first <= row < s.last)
        assert mine[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(mine))
        assert mine[-1][1] > int(at[row])
    assert all(s.mask is not None or s.stop <= int(at[s.first]) for s in steps)
    read = sum((s.last - s.first) * (s.stop - s.start) for s in steps)
    assert read - int((at + 1).sum()) < len(at) * 6 * halves.LEAF / 2  # half a leaf's span a row
