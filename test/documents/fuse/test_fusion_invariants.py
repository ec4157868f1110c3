"""Invariants for every model: fused prefill with exact KV, or with all rows, equals prefill."""

import functools
from types import SimpleNamespace

import pytest
import torch
from comparators import SELECTORS, make_selector
from comparators.weights import from_transformers

from canopy_documents.fuse import cache as caches
from canopy_documents.fuse.encode import Encoder, capture
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.rows import prefill, run_rows
from canopy_documents.store.chunk import FusedPrompt, PlacedChunk
from sglang_canopy.errors import CanopyError
from support.document_models import paged_cache
from support.fused_prompts import encode

TOLERANCE = 1e-4


def fill_with_garbage(cache):
    for pool in (*cache.k, *cache.v):
        pool.normal_(0, 3)
    return cache


def plain_prefill(model, ids):
    cache = caches.dense_cache(model, ids.numel())
    return model.logits(prefill(model, ids, cache)), cache


def prompt_of(model, ids):
    """20 tokens of prefix, chunks of 60, 1, 0 and 90 tokens with a gap, and a question."""
    prefix = ids[:20].tolist()
    spans = [(20, 80), (80, 81), (81, 81), (90, 180)]
    chunks = [(encode(model, ids[start:end].tolist(), prefix), start) for start, end in spans]
    return FusedPrompt(ids, tuple(PlacedChunk(chunk, start) for chunk, start in chunks))


def exact_prompt(model, ids, cache):
    """Chunks whose KV is the prompt's own."""
    spans = [(20, 80), (80, 81), (90, 180)]
    return FusedPrompt(
        ids, tuple(PlacedChunk(capture(model, cache, ids[a:b].tolist(), a), a) for a, b in spans)
    )


def test_plain_prefill_is_transformers(hf_model, ids):
    with torch.no_grad():
        expected = hf_model(ids[None]).logits[0]
    logits, _ = plain_prefill(from_transformers(hf_model), ids)
    assert (logits - expected).abs().max() < TOLERANCE


def test_recomputing_everything_over_garbage_is_plain_prefill(hf_model, ids):
    model = from_transformers(hf_model)
    expected, _ = plain_prefill(model, ids)
    prompt = prompt_of(model, ids)
    cache = fill_with_garbage(caches.dense_cache(model, len(prompt)))
    fused = fused_prefill(model, prompt, cache, make_selector("random"), 1.0)
    assert fused.rows.numel() == len(prompt)
    assert (fused.logits - expected[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("rows_run", [1, 40, 150])
def test_any_rows_over_exact_kv_give_the_plain_rows(hf_model, ids, rows_run):
    model = from_transformers(hf_model)
    expected, cache = plain_prefill(model, ids)
    rows = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(rows_run))[:rows_run]
    rows = rows.sort()[0]
    hidden_states = run_rows(model, ids[rows], rows, cache)
    assert (model.logits(hidden_states) - expected[rows]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", list(SELECTORS))
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5, 1.0])
def test_every_selector_over_exact_chunks_is_plain_prefill(llama, ids, name, ratio):
    expected, cache = plain_prefill(llama, ids)
    prompt = exact_prompt(llama, ids, cache)
    fused_cache = fill_with_garbage(caches.dense_cache(llama, len(prompt)))
    fused = fused_prefill(llama, prompt, fused_cache, make_selector(name), ratio)
    assert (fused.logits - expected[-1]).abs().max() < TOLERANCE
    for layer in range(llama.shape.layers):
        assert (fused_cache.k[layer] - cache.k[layer]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("page_tokens", "layout"), [(1, "NHD"), (16, "NHD"), (16, "HND"), (64, "HND")]
)
def test_pages_and_layouts_do_not_matter(llama, ids, page_tokens, layout):
    prompt = prompt_of(llama, ids)
    cache = caches.dense_cache(llama, len(prompt))
    expected = fused_prefill(llama, prompt, cache, make_selector("question"), 0.2)
    paged_kv = fill_with_garbage(paged_cache(llama, len(prompt), page_tokens, layout))
    fused = fused_prefill(llama, prompt, paged_kv, make_selector("question"), 0.2)
    assert torch.equal(fused.rows, expected.rows)
    assert (fused.logits - expected.logits).abs().max() < TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is on the CPU: interpreted only")
def test_triton_and_torch_agree_through_a_whole_model(llama, ids, monkeypatch):
    from canopy_kernel import attention

    pytest.importorskip("triton")
    attend = attention.sparse_prefill
    chunk = encode(llama, ids[20:60].tolist(), ids[:20].tolist())
    prompt = FusedPrompt(ids[:70], (PlacedChunk(chunk, 20),))
    logits = []
    for backend in ("triton", "blocked", "reference"):
        cache = paged_cache(llama, len(prompt), 16)
        forced = functools.partial(attend, backend=backend)
        monkeypatch.setattr(attention, "sparse_prefill", forced)
        logits.append(fused_prefill(llama, prompt, cache, make_selector("first-k"), 0.1).logits)
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE
    assert (logits[0] - logits[2]).abs().max() < TOLERANCE


def test_one_encoder_makes_the_chunks_that_single_calls_make(llama, ids):
    prefix = ids[:30].tolist()
    encoder = Encoder(llama, prefix)
    for document_ids in (ids[50:90].tolist(), [], ids[90:93].tolist(), ids[50:90].tolist()):
        tokens = torch.tensor([*prefix, *document_ids])
        cache = caches.dense_cache(llama, len(tokens))
        prefill(llama, tokens, cache)
        chunk = encoder.encode(document_ids)
        expected = capture(llama, cache, document_ids, len(prefix), prefix)
        assert chunk.ids == expected.ids
        assert chunk.prefix == tuple(prefix)
        if document_ids:
            assert (chunk.raw_k - expected.raw_k).abs().max() < 1e-4
            assert (chunk.v - expected.v).abs().max() < 1e-4


def test_in_bf16_fusion_is_within_the_rounding_of_plain_prefill(ids):
    from support.document_models import build_model

    expected, _ = plain_prefill(from_transformers(build_model("llama")), ids)
    bf16_model = from_transformers(build_model("llama", torch.bfloat16))
    bf16_logits, cache = plain_prefill(bf16_model, ids)

    def relative_difference(logits, reference):
        return float((logits - reference).norm() / reference.norm())

    bf16_rounding = relative_difference(bf16_logits[-1], expected[-1])
    assert 0.001 < bf16_rounding < 0.1
    prompt = prompt_of(bf16_model, ids)
    all_rows_cache = fill_with_garbage(caches.dense_cache(bf16_model, len(prompt)))
    fused = fused_prefill(bf16_model, prompt, all_rows_cache, make_selector("random"), 1.0)
    assert relative_difference(fused.logits, bf16_logits[-1]) < 1e-5
    prompt = exact_prompt(bf16_model, ids, cache)
    fused_cache = caches.dense_cache(bf16_model, len(prompt))
    fused = fused_prefill(bf16_model, prompt, fused_cache, make_selector("random"), 0.15)
    assert relative_difference(fused.logits, bf16_logits[-1]) < 2 * bf16_rounding


def test_the_last_token_is_computed_even_inside_a_chunk(llama, ids):
    chunk = encode(llama, ids[20:80].tolist(), ids[:20].tolist())
    prompt = FusedPrompt(ids[:80], (PlacedChunk(chunk, 20),))
    expected, _ = plain_prefill(llama, ids[:80])
    for name in SELECTORS:
        cache = caches.dense_cache(llama, 80)
        fused = fused_prefill(llama, prompt, cache, make_selector(name), 0.1)
        assert (fused.logits - expected[-1]).abs().max() < TOLERANCE, name


def test_a_prompt_longer_than_a_sliding_window_is_refused(ids):
    import dataclasses

    from support.document_models import build_model

    model = from_transformers(build_model("llama"))
    windowed = dataclasses.replace(model, window=100)
    with pytest.raises(CanopyError, match="sliding window of 100"):
        plain_prefill(windowed, ids)


def test_a_view_of_a_cache_waits_for_the_same_transfers(llama):
    awaited_layers, cache = [], caches.dense_cache(llama, 8)
    cache.transfers.append(SimpleNamespace(order_after=awaited_layers.append))
    cache.truncated(4).read(1, torch.arange(4))
    assert awaited_layers == [1]
