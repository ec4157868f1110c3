"""What each selector chooses, on chunks small enough to check by hand."""

from __future__ import annotations

import itertools

import numpy
import pytest

torch = pytest.importorskip("torch")


from canopy_chunks import cache as caches  # noqa: E402
from canopy_chunks.chunk import Chunk, FusedPrompt, Placed  # noqa: E402
from canopy_chunks.encode import encode  # noqa: E402
from canopy_chunks.fusion import fused_prefill  # noqa: E402
from canopy_chunks.selectors import (  # noqa: E402
    SELECTORS,
    Context,
    make_selector,
    offline_selectors,
)
from canopy_chunks.selectors.frequency import layer_scores  # noqa: E402
from sglang_canopy.errors import CanopyError  # noqa: E402


def flat_chunk(n=16, layers=1):
    k = torch.ones(layers, n, 1, 2)
    return Chunk(tuple(range(n)), k, torch.ones(layers, n, 1, 2))


def prompt(model, ids, behind=True):
    prefix = ids[:20].tolist() if behind else ()
    return FusedPrompt(
        ids, tuple(Placed(encode(model, ids[a : a + 60].tolist(), prefix), a) for a in (20, 80))
    )


def test_low_frequency_energy_follows_the_slow_bump_and_not_the_spike():
    chunk = flat_chunk(64)
    slow = torch.exp(-((torch.arange(64.0) - 20) ** 2) / 50)
    chunk.v[0, :, 0, 0] = chunk.raw_k[0, :, 0, 0] = 10 * slow
    chunk.v[0, 50, 0, 0] = chunk.raw_k[0, 50, 0, 0] = 10.0
    low = layer_scores(chunk)[0]
    high = layer_scores(chunk, high=True)[0]
    assert abs(int(low.argmax()) - 20) <= 1
    assert abs(int(high.argmax()) - 50) <= 1
    assert float(low.sum()) == pytest.approx(1.0)


def test_offline_scores_are_made_once_and_stored_with_the_chunk(llama, ids):
    chunk = encode(llama, ids[:40].tolist())
    for selector in offline_selectors():
        first = selector.scores(chunk)
        assert selector.scores(chunk) is first
        assert first.shape[-1] == 40
    assert {"frequency", "random", "high-frequency", "v-norm", "first-k"} <= set(chunk.scores)


def test_first_k_takes_the_head_of_every_chunk(llama, ids):
    p = prompt(llama, ids)
    context = Context(llama, p, caches.dense_cache(llama, len(p)), 0.05)
    assert make_selector("first-k").choose(context).tokens.tolist() == [20, 21, 22, 80, 81, 82]


SPENDS_MORE = ("hkvd", "frequency-per-layer", "frequency-nested", "epic")
"""Those with a rule of their own, each tested below."""


@pytest.mark.parametrize("name", [n for n in SELECTORS if n not in SPENDS_MORE])
@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.6])
def test_nobody_spends_more_than_the_budget_or_outside_chunks(llama, ids, name, ratio):
    p = prompt(llama, ids)
    cache = caches.dense_cache(llama, len(p))
    fused = fused_prefill(llama, p, cache, make_selector(name), ratio)
    inside = p.in_chunk()[fused.rows]
    assert inside.sum() <= int(ratio * p.reusable)
    assert (~inside).sum() == len(p) - p.reusable
    assert torch.equal(fused.rows, fused.rows.sort()[0])


@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.6])
def test_epic_takes_the_first_16_tokens_of_each_chunk_whatever_the_ratio(llama, ids, ratio):
    short = Placed(encode(llama, ids[180:190].tolist()), 180)
    p = prompt(llama, ids)
    p = FusedPrompt(p.ids, (*p.placed, short))
    fused = fused_prefill(llama, p, caches.dense_cache(llama, len(p)), make_selector("epic"), ratio)
    chosen = fused.rows[p.in_chunk()[fused.rows]].tolist()
    assert chosen == [*range(20, 36), *range(80, 96), *range(180, 190)]


def test_per_layer_sets_replace_at_each_layer_what_equation_7_names_and_nothing_else(llama, ids):
    from canopy_chunks.placement import place_chunks

    p, ratio = prompt(llama, ids, behind=False), 0.2
    reused = caches.dense_cache(llama, len(p))
    place_chunks(llama, p.placed, reused, p.in_chunk())
    fused_cache = caches.dense_cache(llama, len(p))
    fused = fused_prefill(llama, p, fused_cache, make_selector("frequency-per-layer"), ratio)
    inside, sets = p.in_chunk(), []
    for layer in range(llama.shape.layers):
        named = set()
        for placed in p.placed:  # equations 2 to 7, with numpy's transform
            energy = 0.0
            for x in (placed.chunk.raw_k[layer], placed.chunk.v[layer]):
                spectrum = numpy.fft.rfft(x.flatten(1).numpy(), axis=0)
                spectrum[int(0.5 * spectrum.shape[0]) :] = 0
                low = numpy.fft.irfft(spectrum, n=len(placed.chunk), axis=0)
                energy = energy + 0.5 * numpy.linalg.norm(low, axis=1)
            count = int(ratio * len(placed.chunk))
            named |= {placed.start + int(i) for i in numpy.argsort(-energy)[:count]}
        sets.append(named)
        if layer:  # layer 0 knows no context: recomputed and reused are the same there
            changed = (fused_cache.v[layer] - reused.v[layer]).flatten(1).abs().amax(1) > 0
            assert set((changed & inside).nonzero()[:, 0].tolist()) == named, layer
    assert len(set(map(frozenset, sets))) > 1
    assert set(fused.rows[inside[fused.rows]].tolist()) == set().union(*sets)


def test_equal_sets_of_all_layers_are_one_set_for_all(llama, ids, monkeypatch):
    from canopy_chunks.selectors import frequency

    one = frequency.layer_scores

    def same(chunk, high=False, alpha=0.5):
        return one(chunk, high, alpha).mean(0, keepdim=True).expand(llama.shape.layers, -1)

    monkeypatch.setattr(frequency, "layer_scores", same)
    found = []
    for name in ("frequency", "frequency-per-layer"):
        p = prompt(llama, ids, behind=False)
        cache = caches.dense_cache(llama, len(p))
        found.append(fused_prefill(llama, p, cache, make_selector(name), 0.15))
    assert torch.equal(found[0].rows, found[1].rows)
    assert torch.allclose(found[0].logits, found[1].logits, atol=1e-4)


def test_a_cutoff_of_its_own_has_scores_of_its_own(llama, ids):
    from canopy_chunks.selectors.frequency import Frequency

    chunk = encode(llama, ids[:40].tolist())
    scores = [Frequency(alpha).scores(chunk) for alpha in (0.3, 0.5, 0.7)]
    assert not torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[1], scores[2])
    assert torch.equal(make_selector("frequency").scores(chunk), scores[1])


def test_prophetkv_takes_what_the_question_attends_to_in_all_layers(llama, ids):
    """Against a plain softmax in float64 over the context's keys, head by head."""
    from canopy_chunks import engine
    from canopy_chunks.placement import place_chunks
    from canopy_chunks.selectors.prophetkv import context_attention

    p = prompt(llama, ids)
    cache = caches.dense_cache(llama, len(p))
    place_chunks(llama, p.placed, cache, p.in_chunk())
    found = context_attention(Context(llama, p, cache, 0.2))
    end, rows = 140, (~p.in_chunk()).nonzero()[:, 0]
    total, shape = numpy.zeros(len(p)), llama.shape

    def watch(layer, q, positions):
        keys = cache.read(layer, torch.arange(end))[0].double().numpy()
        asked = q[positions >= end].double().numpy()
        for head in range(shape.heads):
            dots = asked[:, head] @ keys[:, head * shape.kv_heads // shape.heads].T
            weight = numpy.exp(dots * shape.head_dim**-0.5)
            weight /= weight.sum(1, keepdims=True)
            total[:end] += weight.mean(0) / shape.heads / shape.layers

    engine.run_rows(llama, p.ids[rows], rows, cache, watch=watch)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
    assert numpy.allclose(found.numpy(), total, atol=1e-6)


@pytest.mark.parametrize("name", ["hkvd", "frequency-nested"])
def test_narrowing_selectors_keep_the_budget_on_average_and_sets_nested(llama, ids, name):
    from canopy_chunks import engine
    from canopy_chunks.placement import place_chunks

    p = prompt(llama, ids)
    cache = caches.dense_cache(llama, len(p))
    place_chunks(llama, p.placed, cache, p.in_chunk())
    choice = make_selector(name).choose(Context(llama, p, cache, 0.2))
    inside = p.in_chunk()
    needed = ~inside
    needed[choice.tokens] = True
    rows = needed.nonzero()[:, 0]
    seen = []
    engine.run_rows(
        llama,
        p.ids[rows],
        rows,
        cache,
        choice.narrow,
        lambda _, q, at: seen.append(set(at.tolist())),
    )
    assert all(b <= a for a, b in itertools.pairwise(seen))
    counts = [len(s) - int((~inside).sum()) for s in seen]
    if name == "hkvd":
        assert counts == [120, 36, 24, 24]
    else:
        assert sum(counts) / len(counts) == pytest.approx(24, abs=1)


def test_the_same_chunk_gets_the_same_random_tokens_everywhere():
    a, b = flat_chunk(), flat_chunk()
    b.raw_k.zero_()
    assert torch.equal(make_selector("random").scores(a), make_selector("random").scores(b))


def test_the_default_spends_nothing_on_a_chunk_that_is_exact(llama, ids):
    def rows(p):
        cache = caches.dense_cache(llama, len(p))
        return fused_prefill(llama, p, cache, make_selector("default"), 0.15).rows

    behind, alone = rows(prompt(llama, ids)), rows(prompt(llama, ids, behind=False))
    assert not ((behind >= 20) & (behind < 80)).any()
    assert ((behind >= 80) & (behind < 140)).sum() == 18
    assert ((alone >= 20) & (alone < 80)).any()


def test_the_oracle_finds_the_tokens_that_were_spoilt(llama, ids):
    p = prompt(llama, ids)
    from canopy_chunks.encode import capture
    from canopy_chunks.engine import prefill

    exact = caches.dense_cache(llama, len(p))
    prefill(llama, p.ids, exact)
    chunk = capture(llama, exact, ids[20:80].tolist(), 20)
    chunk.v[:, 33] += 5
    spoilt = FusedPrompt(ids, (Placed(chunk, 20),))
    fused = fused_prefill(
        llama, spoilt, caches.dense_cache(llama, len(p)), make_selector("oracle"), 0.02
    )
    assert 53 in fused.rows.tolist()


def test_what_precedes_the_first_chunk_is_not_probed_again(llama, ids):
    from canopy_chunks import engine
    from canopy_chunks.placement import place_chunks
    from canopy_chunks.selectors.query import query_scores

    p = prompt(llama, ids)
    cache = caches.dense_cache(llama, len(p))
    place_chunks(llama, p.placed, cache, p.in_chunk())
    whole = query_scores(Context(llama, p, cache, 0.2))
    engine.prefill(llama, p.ids[:20], cache)
    ready = query_scores(Context(llama, p, cache, 0.2, ready=20))
    assert torch.allclose(whole, ready, atol=1e-5)
    for layer in range(llama.shape.layers):
        cache.k[layer][:20] = 0  # the probe reads them and does not make them again
    assert not torch.allclose(whole, query_scores(Context(llama, p, cache, 0.2, 20)), atol=1e-5)


@pytest.mark.parametrize("share", [[1.0, 1.0, 1.0], [0.25, 0.25, 0.5]])
def test_a_probe_weighs_keys_by_the_attention_it_computes(share):
    from canopy_chunks.selectors.query import _weighed
    from canopy_kernel import attention

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    at, share = torch.tensor([4, 17, 19]), torch.tensor(share)
    out, mass = _weighed(q, k, v, at, 4, share, 0.3)
    rows = attention.Rows.one(at, torch.arange(20))
    assert torch.allclose(out, attention.reference(q, k[:, None], v[:, None], rows, 0.3), atol=1e-5)
    assert float(mass.sum()) == pytest.approx(4 * float(share.sum()), rel=1e-5)
    first = torch.softmax(torch.einsum("hd,nhd->hn", q[0], k[:5].repeat_interleave(2, 1)) * 0.3, -1)
    rest = _weighed(q[1:], k, v, at[1:], 17, share[1:], 0.3)[1]
    assert torch.allclose(mass[:5], share[0] * first.sum(0) + rest[:5], atol=1e-5)


def test_a_sample_of_keys_stands_for_those_like_it(llama, ids, monkeypatch):
    """Where eight neighbours are the same key and value, reading one of them is reading all."""
    from canopy_chunks.selectors import query

    shape, n = llama.shape, 96
    rows = torch.zeros(shape.layers, n, shape.kv_heads, shape.head_dim)
    p = FusedPrompt(ids, (Placed(Chunk(tuple(ids[20 : 20 + n].tolist()), rows, rows), 20),))
    like = torch.randn(2, shape.layers, n // 8, 1, shape.kv_heads, shape.head_dim)
    found = []
    for stride in (1, 8):
        monkeypatch.setattr(query, "STRIDE", stride)
        monkeypatch.setattr(query, "FEWEST", 1)
        cache = caches.dense_cache(llama, len(p))
        for layer in range(shape.layers):
            for pool, same in ((cache.k, like[0]), (cache.v, like[1])):
                pool[layer][20 : 20 + n] = same[layer].repeat_interleave(8, 0)
        found.append(query.query_scores(Context(llama, p, cache, 0.15), last_weight=0.5))
        assert (
            query._sampled(p, torch.tensor([len(p) - 1]), 1)[0].numel() == len(p) - n + n // stride
        )
    assert torch.allclose(found[0], found[1], atol=1e-5)
    assert float(found[0].sum()) > 1


def test_a_long_head_computed_first_changes_nothing(llama, ids, monkeypatch):
    from canopy_chunks import fusion

    p, found = prompt(llama, ids), []
    for shortest in (1, 1000):
        monkeypatch.setattr(fusion, "HEAD_TOKENS", shortest)
        cache = caches.dense_cache(llama, len(p))
        found.append(fused_prefill(llama, p, cache, make_selector("default"), 0.15))
    assert torch.equal(found[0].rows, found[1].rows)
    assert torch.allclose(found[0].logits, found[1].logits, atol=1e-4)


def test_an_unknown_selector_is_named_with_those_allowed():
    with pytest.raises(CanopyError, match="'magic' is not known; allowed are default, frequency"):
        make_selector("magic")


def test_a_prompt_without_chunks_is_plain(llama, ids):
    p = FusedPrompt(ids, ())
    for name in SELECTORS:
        fused = fused_prefill(
            llama, p, caches.dense_cache(llama, len(p)), make_selector(name), 0.15
        )
        assert fused.rows.numel() == len(p), name
