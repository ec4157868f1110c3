"""Choices of each selector, on chunks small enough to check by hand."""

import pytest
import torch

from canopy_documents.fuse import cache as caches
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.selectors import SELECTORS, SelectorInput, make_selector
from canopy_documents.fuse.selectors.frequency import layer_scores
from canopy_documents.store.chunk import Chunk, FusedPrompt, PlacedChunk
from sglang_canopy.errors import CanopyError
from support.fused_prompts import chunk_of_ones, encode, two_document_prompt


def test_low_frequency_energy_follows_the_slow_bump_and_not_the_spike():
    chunk = chunk_of_ones(64)
    slow = torch.exp(-((torch.arange(64.0) - 20) ** 2) / 50)
    chunk.v[0, :, 0, 0] = chunk.raw_k[0, :, 0, 0] = 10 * slow
    chunk.v[0, 50, 0, 0] = chunk.raw_k[0, 50, 0, 0] = 10.0
    low_scores = layer_scores(chunk)[0]
    high_scores = layer_scores(chunk, high=True)[0]
    assert abs(int(low_scores.argmax()) - 20) <= 1
    assert abs(int(high_scores.argmax()) - 50) <= 1
    assert float(low_scores.sum()) == pytest.approx(1.0)


def test_offline_scores_are_made_once_and_stored_with_the_chunk(llama, ids):
    chunk = encode(llama, ids[:40].tolist())
    selector = make_selector("frequency")
    scores = selector.scores(chunk)
    assert selector.scores(chunk) is scores is chunk.scores["frequency"]
    assert scores.shape == (40,)


def test_the_cutoff_of_frequency_is_half_of_the_spectrum(llama, ids):
    chunk = encode(llama, ids[:40].tolist())
    scores = [layer_scores(chunk, alpha=alpha).mean(dim=0) for alpha in (0.3, 0.5, 0.7)]
    assert not torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[1], scores[2])
    assert torch.equal(make_selector("frequency").scores(chunk), scores[1])


def test_the_default_selector_recomputes_no_token_of_an_exact_chunk(llama, ids):
    def computed_rows(prompt):
        cache = caches.dense_cache(llama, len(prompt))
        return fused_prefill(llama, prompt, cache, make_selector("question"), 0.15).rows

    rows_if_exact = computed_rows(two_document_prompt(llama, ids))
    rows_if_inexact = computed_rows(two_document_prompt(llama, ids, with_prefix=False))
    assert not ((rows_if_exact >= 20) & (rows_if_exact < 80)).any()
    assert ((rows_if_exact >= 80) & (rows_if_exact < 140)).sum() == 18
    assert ((rows_if_inexact >= 20) & (rows_if_inexact < 80)).any()


def test_text_before_the_first_chunk_is_not_probed_again(llama, ids):
    from canopy_documents.fuse import rows as engine
    from canopy_documents.fuse.placement import place_chunks
    from canopy_documents.fuse.selectors.question import question_scores

    prompt = two_document_prompt(llama, ids)
    cache = caches.dense_cache(llama, len(prompt))
    place_chunks(llama, prompt.placed, cache, prompt.in_chunk())
    scores = question_scores(SelectorInput(llama, prompt, cache, 0.2))
    engine.prefill(llama, prompt.ids[:20], cache)
    selector_input = SelectorInput(llama, prompt, cache, 0.2, exact_prefix_tokens=20)
    cached_scores = question_scores(selector_input)
    assert torch.allclose(scores, cached_scores, atol=1e-5)
    for layer in range(llama.shape.layers):
        cache.k[layer][:20] = 0  # the probe reads them and does not recompute them
    scores_with_zero_keys = question_scores(SelectorInput(llama, prompt, cache, 0.2, 20))
    assert not torch.allclose(scores, scores_with_zero_keys, atol=1e-5)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.25, 0.25, 0.5]])
def test_a_probe_weighs_keys_by_the_attention_it_computes(weights):
    from canopy_documents.fuse.selectors.question import _attend_and_score
    from canopy_kernel import attention

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    positions, weights = torch.tensor([4, 17, 19]), torch.tensor(weights)
    out, mass = _attend_and_score(q, k, v, positions, 4, weights, 0.3)
    rows = attention.Rows.single(positions, torch.arange(20))
    assert torch.allclose(out, attention.reference(q, k[:, None], v[:, None], rows, 0.3), atol=1e-5)
    assert float(mass.sum()) == pytest.approx(4 * float(weights.sum()), rel=1e-5)
    first = torch.softmax(torch.einsum("hd,nhd->hn", q[0], k[:5].repeat_interleave(2, 1)) * 0.3, -1)
    later_mass = _attend_and_score(q[1:], k, v, positions[1:], 17, weights[1:], 0.3)[1]
    assert torch.allclose(mass[:5], weights[0] * first.sum(0) + later_mass[:5], atol=1e-5)


def test_a_sampled_key_represents_similar_keys(llama, ids, monkeypatch):
    """If eight adjacent tokens have equal keys and values, reading one of them is enough."""
    from canopy_documents.fuse.selectors import question

    shape, chunk_tokens = llama.shape, 96
    zero_kv = torch.zeros(shape.layers, chunk_tokens, shape.kv_heads, shape.head_dim)
    chunk = Chunk(tuple(ids[20 : 20 + chunk_tokens].tolist()), zero_kv, zero_kv)
    prompt = FusedPrompt(ids, (PlacedChunk(chunk, 20),))
    distinct_kv = torch.randn(2, shape.layers, chunk_tokens // 8, 1, shape.kv_heads, shape.head_dim)
    scores = []
    for stride in (1, 8):
        monkeypatch.setattr(question, "STRIDE", stride)
        monkeypatch.setattr(question, "MIN_SAMPLES", 1)
        cache = caches.dense_cache(llama, len(prompt))
        for layer in range(shape.layers):
            for pool, kv_by_layer in ((cache.k, distinct_kv[0]), (cache.v, distinct_kv[1])):
                pool[layer][20 : 20 + chunk_tokens] = kv_by_layer[layer].repeat_interleave(8, 0)
        selector_input = SelectorInput(llama, prompt, cache, 0.15)
        scores.append(question.question_scores(selector_input, last_weight=0.5))
        assert (
            question._sample_keys(prompt, torch.tensor([len(prompt) - 1]), 1)[0].numel()
            == len(prompt) - chunk_tokens + chunk_tokens // stride
        )
    assert torch.allclose(scores[0], scores[1], atol=1e-5)
    assert float(scores[0].sum()) > 1


def test_computing_a_long_prompt_head_first_gives_the_same_logits(llama, ids, monkeypatch):
    from canopy_documents.fuse import fusion

    prompt, fused_prefills = two_document_prompt(llama, ids), []
    for head_tokens in (1, 1000):
        monkeypatch.setattr(fusion, "MIN_HEAD_TOKENS", head_tokens)
        cache = caches.dense_cache(llama, len(prompt))
        fused_prefills.append(fused_prefill(llama, prompt, cache, make_selector("question"), 0.15))
    assert torch.equal(fused_prefills[0].rows, fused_prefills[1].rows)
    assert torch.allclose(fused_prefills[0].logits, fused_prefills[1].logits, atol=1e-4)


def test_an_unknown_selector_is_named_with_those_allowed():
    with pytest.raises(CanopyError, match="'magic' is not known; allowed are question, frequency"):
        make_selector("magic")


def test_a_prompt_without_chunks_is_computed_whole(llama, ids):
    prompt = FusedPrompt(ids, ())
    for name in SELECTORS:
        cache = caches.dense_cache(llama, len(prompt))
        fused = fused_prefill(llama, prompt, cache, make_selector(name), 0.15)
        assert fused.rows.numel() == len(prompt), name
