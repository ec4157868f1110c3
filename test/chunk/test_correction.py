"""What recomputed tokens reveal is carried to the others: the weights, where they go, what stays exact."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from comparators import SELECTORS, make_selector  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from canopy_chunks import cache as caches  # noqa: E402
from canopy_chunks import correction  # noqa: E402
from canopy_chunks.chunk import FusedPrompt, Placed  # noqa: E402
from canopy_chunks.encode import capture, encode  # noqa: E402
from canopy_chunks.engine import prefill  # noqa: E402
from canopy_chunks.fusion import fused_prefill  # noqa: E402
from canopy_chunks.placement import place_chunks  # noqa: E402
from canopy_chunks.rope import unrotate  # noqa: E402
from canopy_kernel import correct, pages  # noqa: E402
from support.chunk_models import paged_cache  # noqa: E402

LIMIT = 1e-4


def plain(model, ids):
    cache = caches.dense_cache(model, ids.numel())
    return model.logits(prefill(model, ids, cache))[-1], cache


def prompt_of(model, ids, gap=0):
    """A prefix of 20, chunks of 60 and 90 behind it (the first exact), a question."""
    prefix = ids[:20].tolist()
    spans = [(20, 80), (80 + gap, 170)]
    return FusedPrompt(
        ids, tuple(Placed(encode(model, ids[a:b].tolist(), prefix), a) for a, b in spans)
    )


def chosen(prompt, every=5):
    computed = ~prompt.in_chunk()
    computed[80::every] = True
    return computed


def numpy_weights(features, positions, rows, starts, width):
    """The mean of a Gaussian process by its textbook formula, one pair at a time."""

    def covariance(i, j, a, b):
        chunk = [max(k for k, s in enumerate(starts) if s <= p) for p in (a, b)]
        out = float(features[i] @ features[j]) ** 2 + 0.2
        if chunk[0] == chunk[1]:
            out += 0.3 + 0.3 * np.exp(-abs(a - b) / 5.0)
        return out

    at = {int(p): i for i, p in enumerate(positions)}
    known = [at[int(r)] for r in rows]
    near = np.array(
        [[covariance(i, j, p, r) for j, r in zip(known, rows)] for i, p in enumerate(positions)]
    )
    weights = near @ np.linalg.inv(near[known] + np.eye(len(known)))
    for row in weights:
        row[np.argsort(-np.abs(row))[width:]] = 0.0
    return weights


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40))
def test_weights_are_those_of_a_gaussian_process(seed, count):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(7, 30), torch.arange(33, 60)])
    starts = torch.tensor([7, 15, 33])
    features = torch.randn(50, 6, generator=generator)
    features = torch.nn.functional.normalize(features, dim=1)
    pick = torch.randperm(50, generator=generator)[:count].sort()[0]
    index, weight = correction.regression_weights(
        features, features[pick], positions, positions[pick], starts
    )
    got = torch.zeros(50, count).scatter_(1, index, weight).double().numpy()
    want = numpy_weights(
        features.double().numpy(),
        positions.tolist(),
        positions[pick].tolist(),
        starts.tolist(),
        correction.WEIGHTS,
    )
    assert np.abs(got - want).max() < 1e-3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_no_head_is_moved_further_than_the_limit(seed):
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(9, 2, 8, generator=generator) * 10
    index = torch.randint(0, 9, (30, 4), generator=generator)
    weight = torch.randn(30, 4, generator=generator)
    limit = torch.rand(2, generator=generator)
    got = correct.weighted(delta, index, weight, limit)
    assert bool((got.norm(dim=-1) <= limit * (1 + 1e-5)).all())
    free = correct.weighted(delta, index, weight, torch.full((2,), 1e9))
    by_hand = torch.einsum("nw,nwhd->nhd", weight, delta[index])
    torch.testing.assert_close(free, by_hand, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", list(SELECTORS))
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_exact_chunks_and_ratio_1_stay_exact(llama, ids, name, ratio):
    expected, cache = plain(llama, ids)
    if ratio == 1.0:
        prompt = prompt_of(llama, ids)
    else:
        prompt = FusedPrompt(
            ids,
            tuple(
                Placed(capture(llama, cache, ids[a:b].tolist(), a), a)
                for a, b in [(20, 80), (80, 170)]
            ),
        )
    fused = caches.dense_cache(llama, len(prompt))
    got = fused_prefill(llama, prompt, fused, make_selector(name), ratio, correct=True)
    assert (got.logits - expected).abs().max() < LIMIT


def planned(model, prompt, cache):
    place_chunks(model, prompt.placed, cache, prompt.in_chunk())
    return correction.plan_correction(model, prompt, cache, chosen(prompt))


@pytest.mark.parametrize("name", ["question", "first-k"])
@pytest.mark.parametrize("gap", [0, 4])
@pytest.mark.parametrize("page", [1, 16])
def test_memory_layout_does_not_matter(llama, ids, page, gap, name):
    prompt = prompt_of(llama, ids, gap)
    results = []
    for cache in (caches.dense_cache(llama, len(ids)), paged_cache(llama, len(ids), page)):
        got = fused_prefill(llama, prompt, cache, make_selector(name), 0.3, correct=True)
        results.append(got.logits)
    assert (results[0] - results[1]).abs().max() < LIMIT
    without = fused_prefill(
        llama, prompt, caches.dense_cache(llama, len(ids)), make_selector(name), 0.3
    )
    assert (results[0] - without.logits).abs().max() > LIMIT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("behind", [0, 7])
def test_rows_that_lie_together_get_what_scattered_ones_get(llama, ids, behind, dtype):
    """Slots one after the other, from any of them on, and the same slots in another order."""
    prompt, heads, dim = prompt_of(llama, ids), llama.shape.kv_heads, llama.shape.head_dim
    orders = (torch.arange(len(ids)), torch.randperm(len(ids)))
    run = int(chosen(prompt).sum())
    new = [torch.randn(run, heads, dim).to(dtype) for _ in range(2)]
    results = []
    for order in orders:
        pools = [
            [torch.zeros(len(ids) + behind, 1, heads, dim) for _ in range(llama.shape.layers)]
            for _ in range(2)
        ]
        cache = caches.KVCache(*pools, order + behind)
        found = planned(llama, prompt, cache)
        assert (found.together is not None) == (order is orders[0])
        k, v = (pool[2].to(dtype) for pool in pools)
        found.apply(2, k, v, *new)
        results.append([pages.read(pool, cache.slots) for pool in (k, v)])
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, atol=limit, rtol=limit)


def test_only_reused_tokens_of_inexact_chunks_are_touched(llama, ids):
    prompt = prompt_of(llama, ids)
    cache = paged_cache(llama, len(ids), 16)
    found = planned(llama, prompt, cache)
    assert found.rows.tolist() == list(range(80, 170, 5))
    assert set(found.targets.tolist()) == set(range(80, 170)) - set(range(80, 170, 5))
    before_k, before_v = cache.k[2].clone(), cache.v[2].clone()
    run = int(chosen(prompt).sum())
    k, v = (torch.randn(run, llama.shape.kv_heads, llama.shape.head_dim) for _ in range(2))
    found.apply(2, cache.k[2], cache.v[2], k, v)
    for pool, before in ((cache.k[2], before_k), (cache.v[2], before_v)):
        moved = (pages.read(pool, cache.slots) != pages.read(before, cache.slots)).any(-1).any(-1)
        assert moved.nonzero()[:, 0].tolist() == found.targets.tolist()
        assert bool((pool == before).all(-1).all(-1).sum() == pool[..., 0, 0].numel() - moved.sum())


def test_nothing_is_corrected_at_the_layer_that_knows_no_context(llama, ids):
    prompt = prompt_of(llama, ids)
    cache = caches.dense_cache(llama, len(ids))
    found, before = planned(llama, prompt, cache), cache.k[0].clone()
    run = int(chosen(prompt).sum())
    k, v = (torch.randn(run, llama.shape.kv_heads, llama.shape.head_dim) for _ in range(2))
    found.apply(0, cache.k[0], cache.v[0], k, v)
    assert torch.equal(cache.k[0], before)


def test_a_difference_that_all_tokens_share_is_mostly_removed(llama, ids):
    """Keys before RoPE and values are off by the same vector everywhere; a fifth is recomputed."""
    _, true = plain(llama, ids)
    offset = torch.randn(2, llama.shape.kv_heads, llama.shape.head_dim)
    whole = capture(llama, true, ids[20:170].tolist(), 20)
    off = dataclasses.replace(whole, raw_k=whole.raw_k + offset[0], v=whole.v + offset[1])
    prompt = FusedPrompt(ids, (Placed(off, 20),))
    cache = caches.dense_cache(llama, len(ids))
    place_chunks(llama, prompt.placed, cache, prompt.in_chunk())
    computed = ~prompt.in_chunk()
    computed[20:170:5] = True
    found = correction.plan_correction(llama, prompt, cache, computed)
    at = computed.nonzero()[:, 0]
    rest = (~computed).nonzero()[:, 0]
    for layer in range(1, llama.shape.layers):
        k, v = true.read(layer, at)
        found.apply(layer, cache.k[layer], cache.v[layer], k, v)
        for pool, want, norm in (
            (cache.k, true.k, offset[0].norm()),
            (cache.v, true.v, offset[1].norm()),
        ):
            left = (pool[layer][rest, 0] - want[layer][rest, 0]).flatten(1).norm(dim=1)
            assert float(left.mean()) < 0.35 * float(norm)


def test_differences_are_those_before_rope(llama, ids):
    """The same difference before RoPE is another one after it at every position."""
    prompt = prompt_of(llama, ids)
    cache = caches.dense_cache(llama, len(ids))
    found = planned(llama, prompt, cache)
    positions = torch.arange(len(ids))
    table = llama.rope.table(positions)
    before = unrotate(cache.k[1][:, 0], table)
    offset = torch.randn(llama.shape.kv_heads, llama.shape.head_dim)
    run = chosen(prompt).nonzero()[:, 0]
    k = llama.rope.apply((before[run] + offset), run)
    found.apply(1, cache.k[1], cache.v[1], k, cache.v[1][run, 0].clone())
    moved = unrotate(cache.k[1][:, 0], table) - before
    for target in found.targets.tolist():
        for head in range(llama.shape.kv_heads):
            cosine = torch.cosine_similarity(moved[target, head], offset[head], dim=0)
            assert float(cosine) > 0.99


@pytest.mark.parametrize(("start", "every"), [(170, 1), (80, 1)])
def test_without_anything_to_learn_or_to_correct_there_is_no_correction(llama, ids, start, every):
    prompt = prompt_of(llama, ids)
    cache = caches.dense_cache(llama, len(ids))
    place_chunks(llama, prompt.placed, cache, prompt.in_chunk())
    computed = ~prompt.in_chunk()
    computed[start::every] = True
    assert correction.plan_correction(llama, prompt, cache, computed) is None


def test_revealed_differences_are_bounded(llama, ids, monkeypatch):
    monkeypatch.setattr(correction, "MOST_REVEALED", 7)
    prompt = prompt_of(llama, ids)
    cache = caches.dense_cache(llama, len(ids))
    found = planned(llama, prompt, cache)
    assert len(found.rows) == 7
    assert found.index.shape[1] == 7
    run = chosen(prompt).nonzero()[:, 0]
    assert run[found.at].tolist() == found.rows.tolist()
