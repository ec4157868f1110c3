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
from support.fused_prompts import encode, flat_chunk, prompt_of_two

OWN_BUDGET = ("hkvd", "epic")
"""Comparators with their own rule, each tested below."""


@pytest.mark.parametrize("name", [n for n in SELECTORS if n not in OWN_BUDGET])
@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.6])
def test_no_selector_exceeds_the_budget_or_leaves_the_chunks(llama, ids, name, ratio):
    prompt = prompt_of_two(llama, ids)
    cache = caches.dense_cache(llama, len(prompt))
    fused = fused_prefill(llama, prompt, cache, make_selector(name), ratio)
    in_chunks = prompt.in_chunk()[fused.rows]
    assert in_chunks.sum() <= int(ratio * prompt.chunk_tokens)
    assert (~in_chunks).sum() == len(prompt) - prompt.chunk_tokens
    assert torch.equal(fused.rows, fused.rows.sort()[0])


def test_first_k_takes_the_head_of_every_chunk(llama, ids):
    prompt = prompt_of_two(llama, ids)
    selector_input = SelectorInput(llama, prompt, caches.dense_cache(llama, len(prompt)), 0.05)
    assert make_selector("first-k").choose(selector_input).tolist() == [20, 21, 22, 80, 81, 82]


@pytest.mark.parametrize("ratio", [0.01, 0.15, 0.6])
def test_epic_takes_the_first_16_tokens_of_each_chunk_at_any_ratio(llama, ids, ratio):
    short = PlacedChunk(encode(llama, ids[180:190].tolist()), 180)
    prompt = prompt_of_two(llama, ids)
    prompt = FusedPrompt(prompt.ids, (*prompt.placed, short))
    cache = caches.dense_cache(llama, len(prompt))
    fused = fused_prefill(llama, prompt, cache, make_selector("epic"), ratio)
    chosen = fused.rows[prompt.in_chunk()[fused.rows]].tolist()
    assert chosen == [*range(20, 36), *range(80, 96), *range(180, 190)]


def test_prophetkv_selects_tokens_that_the_question_attends_to_in_all_layers(llama, ids):
    """Against a plain softmax in float64 over the context's keys, head by head."""
    from comparators.prophetkv import context_attention

    from canopy_documents.fuse import rows as engine

    prompt = prompt_of_two(llama, ids)
    cache = caches.dense_cache(llama, len(prompt))
    place_chunks(llama, prompt.placed, cache, prompt.in_chunk())
    scores = context_attention(SelectorInput(llama, prompt, cache, 0.2))
    end, rows = 140, (~prompt.in_chunk()).nonzero()[:, 0]
    expected, shape = numpy.zeros(len(prompt)), llama.shape

    def add_attention(layer, q, positions):
        keys = cache.read(layer, torch.arange(end))[0].double().numpy()
        queries = q[positions >= end].double().numpy()
        for head in range(shape.heads):
            dots = queries[:, head] @ keys[:, head * shape.kv_heads // shape.heads].T
            weights = numpy.exp(dots * shape.head_dim**-0.5)
            weights /= weights.sum(1, keepdims=True)
            expected[:end] += weights.mean(0) / shape.heads / shape.layers

    engine.run_rows(llama, prompt.ids[rows], rows, cache, watch=add_attention)
    assert float(scores.sum()) == pytest.approx(1.0, abs=1e-5)
    assert numpy.allclose(scores.numpy(), expected, atol=1e-6)


def test_hkvd_narrows_its_set_in_two_steps(llama, ids, monkeypatch):
    prompt = prompt_of_two(llama, ids)
    cache = caches.dense_cache(llama, len(prompt))
    place_chunks(llama, prompt.placed, cache, prompt.in_chunk())
    selections, choose = [], deviation.top_positions

    def record(scores, count):
        return selections.append(choose(scores, count)) or selections[-1]

    monkeypatch.setattr(deviation, "top_positions", record)
    chosen = make_selector("hkvd").choose(SelectorInput(llama, prompt, cache, 0.2))
    outside = len(prompt) - prompt.chunk_tokens
    assert [len(selection) - outside for selection in selections] == [36, 24]
    assert len(chosen) == 24
    assert prompt.in_chunk()[chosen].all()


def test_the_same_chunk_gets_the_same_random_tokens_everywhere():
    a, b = flat_chunk(), flat_chunk()
    b.raw_k.zero_()
    assert torch.equal(make_selector("random").scores(a), make_selector("random").scores(b))


def test_the_oracle_selects_a_token_with_wrong_values(llama, ids):
    prompt = prompt_of_two(llama, ids)
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
