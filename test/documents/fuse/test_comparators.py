"""Choices of CacheTune's baselines and controls (benchmark/documents/comparators)."""

import numpy
import pytest
import torch
from comparators import SELECTORS, deviation, make_selector

from canopy_documents.fuse import cache as caches
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.placement import place_chunks
from canopy_documents.fuse.selectors import SelectorInput
from canopy_documents.store.chunk import FusedPrompt, PlacedChunk
from support.fused_prompts import chunk_of_ones, encode, two_document_prompt

SELECTORS_WITH_OWN_BUDGET = ("hkvd", "epic")
"""Comparators that do not take ``ratio`` of the chunk tokens; each has a test below."""


@pytest.mark.parametrize("name", [n for n in SELECTORS if n not in SELECTORS_WITH_OWN_BUDGET])
@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.6])
def test_no_selector_exceeds_the_budget_or_leaves_the_chunks(llama, ids, name, ratio):
    prompt = two_document_prompt(llama, ids)
    cache = caches.dense_cache(llama, len(prompt))
    fused = fused_prefill(llama, prompt, cache, make_selector(name), ratio)
    in_chunks = prompt.in_chunk()[fused.rows]
    assert in_chunks.sum() <= int(ratio * prompt.chunk_tokens)
    assert (~in_chunks).sum() == len(prompt) - prompt.chunk_tokens
    assert torch.equal(fused.rows, fused.rows.sort()[0])


def test_first_k_takes_the_head_of_every_chunk(llama, ids):
    prompt = two_document_prompt(llama, ids)
    selector_input = SelectorInput(llama, prompt, caches.dense_cache(llama, len(prompt)), 0.05)
    assert make_selector("first-k").choose(selector_input).tolist() == [20, 21, 22, 80, 81, 82]


@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.6])
def test_epic_takes_the_first_16_tokens_of_each_chunk_at_any_ratio(llama, ids, ratio):
    short_chunk = PlacedChunk(encode(llama, ids[180:190].tolist()), 180)
    prompt = two_document_prompt(llama, ids)
    prompt = FusedPrompt(prompt.ids, (*prompt.placed, short_chunk))
    cache = caches.dense_cache(llama, len(prompt))
    fused = fused_prefill(llama, prompt, cache, make_selector("epic"), ratio)
    chosen = fused.rows[prompt.in_chunk()[fused.rows]].tolist()
    assert chosen == [*range(20, 36), *range(80, 96), *range(180, 190)]


def test_prophetkv_selects_tokens_that_the_question_attends_to_in_all_layers(llama, ids):
    """The expected scores are a plain softmax in float64 over the keys before the question, per head."""
    from comparators.prophetkv import context_attention

    from canopy_documents.fuse import rows as engine

    prompt = two_document_prompt(llama, ids)
    cache = caches.dense_cache(llama, len(prompt))
    place_chunks(llama, prompt.placed, cache, prompt.in_chunk())
    scores = context_attention(SelectorInput(llama, prompt, cache, 0.2))
    context_end, question_rows = 140, (~prompt.in_chunk()).nonzero()[:, 0]
    expected_scores, shape = numpy.zeros(len(prompt)), llama.shape

    def add_attention(layer, q, positions):
        keys = cache.read(layer, torch.arange(context_end))[0].double().numpy()
        queries = q[positions >= context_end].double().numpy()
        for head in range(shape.heads):
            dots = queries[:, head] @ keys[:, head * shape.kv_heads // shape.heads].T
            weights = numpy.exp(dots * shape.head_dim**-0.5)
            weights /= weights.sum(1, keepdims=True)
            expected_scores[:context_end] += weights.mean(0) / shape.heads / shape.layers

    engine.run_rows(llama, prompt.ids[question_rows], question_rows, cache, watch=add_attention)
    assert float(scores.sum()) == pytest.approx(1.0, abs=1e-5)
    assert numpy.allclose(scores.numpy(), expected_scores, atol=1e-6)


def test_hkvd_narrows_its_set_in_two_steps(llama, ids, monkeypatch):
    prompt = two_document_prompt(llama, ids)
    cache = caches.dense_cache(llama, len(prompt))
    place_chunks(llama, prompt.placed, cache, prompt.in_chunk())
    selections, top_positions = [], deviation.top_positions

    def record(scores, count):
        return selections.append(top_positions(scores, count)) or selections[-1]

    monkeypatch.setattr(deviation, "top_positions", record)
    chosen = make_selector("hkvd").choose(SelectorInput(llama, prompt, cache, 0.2))
    tokens_outside_chunks = len(prompt) - prompt.chunk_tokens
    assert [len(selection) - tokens_outside_chunks for selection in selections] == [36, 24]
    assert len(chosen) == 24
    assert prompt.in_chunk()[chosen].all()


def test_random_tokens_do_not_depend_on_a_chunks_keys():
    chunk, b = chunk_of_ones(), chunk_of_ones()
    b.raw_k.zero_()
    assert torch.equal(make_selector("random").scores(chunk), make_selector("random").scores(b))


def test_the_oracle_selects_a_token_with_wrong_values(llama, ids):
    prompt = two_document_prompt(llama, ids)
    from canopy_documents.fuse.encode import capture
    from canopy_documents.fuse.rows import prefill

    exact = caches.dense_cache(llama, len(prompt))
    prefill(llama, prompt.ids, exact)
    chunk = capture(llama, exact, ids[20:80].tolist(), 20)
    chunk.v[:, 33] += 5
    wrong_prompt = FusedPrompt(ids, (PlacedChunk(chunk, 20),))
    cache = caches.dense_cache(llama, len(prompt))
    fused = fused_prefill(llama, wrong_prompt, cache, make_selector("oracle"), 0.02)
    assert 53 in fused.rows.tolist()
