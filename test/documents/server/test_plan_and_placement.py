"""A server's choices and placement equal the engine's over its own cache; fused batches attend by position."""

from types import SimpleNamespace

import pytest
import torch

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.cache import KVCache, dense_cache
from canopy_documents.fuse.fusion import fused_prefill
from canopy_documents.fuse.selectors import make_selector
from canopy_documents.server import attention as server_attention
from canopy_documents.server.engine import DocumentEngine
from canopy_documents.server.model_view import check_layout, pool_views, row_cache
from canopy_documents.server.plan import PromptSlots, choose_tokens, replan
from canopy_documents.store.chunk import ChunkSuffix, PlacedChunk
from canopy_kernel import attention
from sglang_canopy.errors import CanopyError
from support.document_engine import pool_runner
from support.split_model import DOCUMENT_TOKENS, PREFIX_TOKENS, QUESTION_TOKENS, prompt_of_three

POOL_SLOTS = 400
SECOND_START = PREFIX_TOKENS + DOCUMENT_TOKENS
RATIO = 0.2


@pytest.fixture
def runner(llama):
    """A model runner whose KV pool holds random numbers."""
    shape = llama.shape
    pool_shape = (shape.layers, POOL_SLOTS, shape.kv_heads, shape.head_dim)
    return pool_runner(shape, torch.randn(pool_shape), torch.randn(pool_shape))


@pytest.fixture
def prompt(llama):
    return prompt_of_three(llama)


def random_slots(tokens: int) -> torch.Tensor:
    return torch.randperm(POOL_SLOTS, generator=torch.Generator().manual_seed(3))[:tokens]


def write_exact_prefix(llama, runner, prompt, slots, tokens: int) -> None:
    """Put the KV of the first ``tokens`` tokens into their slots, as a radix hit does."""
    keys, values = pool_views(runner)
    if tokens:
        row_forward.prefill(llama, prompt.ids[:tokens], KVCache(keys, values, slots[:tokens]))


def choose(llama, runner, prompt, slots, selector="question", ratio=RATIO, prefix=0, placed=None):
    placed = prompt.placed if placed is None else placed
    prompt_slots = PromptSlots(prompt.ids, slots, prefix, placed)
    return choose_tokens(llama, runner, prompt_slots, make_selector(selector), ratio, [])


@pytest.mark.parametrize("selector", ["question", "frequency"])
@pytest.mark.parametrize("allocated", [None, 70])
def test_a_server_chooses_as_the_engine_does(llama, runner, prompt, selector, allocated) -> None:
    slots = random_slots(len(prompt))
    chosen, _ = choose(llama, runner, prompt, slots[:allocated], selector)
    computed = chosen.mask()
    cache = dense_cache(llama, len(prompt))
    fused = fused_prefill(llama, prompt, cache, make_selector(selector), RATIO)
    assert torch.equal(computed.nonzero()[:, 0], fused.rows)


def test_fused_rows_over_the_pool_give_the_engines_logits(llama, runner, prompt) -> None:
    slots = random_slots(len(prompt))
    chosen, in_place = choose(llama, runner, prompt, slots)
    assert in_place
    positions = chosen.rows()
    pool_cache = row_cache(runner, slots, 0)
    hidden_states = row_forward.run_rows(llama, prompt.ids[positions], positions, pool_cache)
    logits = llama.logits(hidden_states[-1:])[0]
    cache = dense_cache(llama, len(prompt))
    expected = fused_prefill(llama, prompt, cache, make_selector("question"), RATIO).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prefix", [0, PREFIX_TOKENS, PREFIX_TOKENS + 20, SECOND_START + 5])
@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_a_cached_prefix_is_neither_computed_nor_written(llama, runner, prompt, prefix, selector):
    slots = random_slots(len(prompt))
    write_exact_prefix(llama, runner, prompt, slots, prefix)
    keys, values = pool_views(runner)
    kv_before = [pool[slots[:prefix]].clone() for pool in (*keys, *values)]
    placed = tuple(
        p if p.start >= prefix else PlacedChunk(ChunkSuffix(p.chunk, prefix - p.start), prefix)
        for p in prompt.placed
        if p.end > prefix
    )
    chosen, _ = choose(llama, runner, prompt, slots, selector, RATIO, prefix, placed)
    computed = chosen.mask()
    assert not computed[:prefix].any()
    assert computed[-QUESTION_TOKENS:].all()
    for kv, new_kv in zip(kv_before, (*keys, *values)):
        assert torch.equal(kv, new_kv[slots[:prefix]])
    budget_tokens = int(RATIO * sum(len(p.chunk) for p in placed))
    chosen_count = int((computed & prompt.in_chunk()).sum())
    assert chosen_count <= budget_tokens
    if selector == "question":
        assert chosen_count >= budget_tokens - 1


def test_at_ratio_one_all_tokens_are_computed_and_at_zero_only_those_outside_chunks(
    llama, runner, prompt
) -> None:
    slots = random_slots(len(prompt))
    at_ratio_1, _ = choose(llama, runner, prompt, slots, ratio=1.0)
    assert at_ratio_1.mask().all()
    at_ratio_0, _ = choose(llama, runner, prompt, slots, ratio=0.0)
    assert torch.equal(at_ratio_0.mask(), ~prompt.in_chunk())


def test_a_restarted_request_computes_the_same_tokens(prompt) -> None:
    tokens = len(prompt)
    is_chosen = torch.zeros(tokens, dtype=torch.bool)
    is_chosen[:PREFIX_TOKENS] = True  # from the exact tree
    is_chosen[[PREFIX_TOKENS + 3, SECOND_START + 7]] = True
    is_chosen[-QUESTION_TOKENS:] = True
    answer_tokens = 5  # generated before the retraction
    replanned = replan(is_chosen, PREFIX_TOKENS, prompt.placed, tokens + answer_tokens)
    assert not replanned[:PREFIX_TOKENS].any()
    assert torch.equal(replanned[PREFIX_TOKENS:tokens], is_chosen[PREFIX_TOKENS:])
    assert replanned[tokens:].all()
    # The prefix and a document were evicted.
    after_eviction = replan(is_chosen, 0, prompt.placed[1:], tokens + answer_tokens)
    assert after_eviction[:SECOND_START].all()
    assert torch.equal(after_eviction[SECOND_START:tokens], is_chosen[SECOND_START:])


def test_a_pool_of_another_layout_is_refused_by_name(llama, runner) -> None:
    check_layout(runner, llama.shape)
    pool = runner.token_to_kv_pool

    class HeadFirstPool:
        get_key_buffer = staticmethod(lambda i: pool.get_key_buffer(i).transpose(1, 2))
        get_value_buffer = staticmethod(pool.get_value_buffer)

    runner.token_to_kv_pool = HeadFirstPool()
    with pytest.raises(CanopyError, match="HeadFirstPool"):
        check_layout(runner, llama.shape)


@pytest.mark.parametrize("layout", ["hnd", "vectorized_5d", "page_major"])
def test_a_similar_layout_is_refused_by_sglangs_name_of_it(llama, runner, layout) -> None:
    runner.token_to_kv_pool.kv_cache_layout = "nhd"
    check_layout(runner, llama.shape)
    runner.token_to_kv_pool.kv_cache_layout = layout
    with pytest.raises(CanopyError, match=f"layout '{layout}'.*plain NHD"):
        check_layout(runner, llama.shape)


def test_a_suffix_is_the_rest_of_its_chunk(llama, prompt) -> None:
    chunk = prompt.placed[0].chunk
    suffix = ChunkSuffix(chunk, 20)
    assert len(suffix) == DOCUMENT_TOKENS - 20
    assert suffix.ids == chunk.ids[20:]
    assert suffix.prefix == chunk.prefix + chunk.ids[:20]
    positions = torch.tensor([0, 5])
    for rows, expected in zip(suffix.rows(1, positions), chunk.rows(1, positions + 20)):
        assert torch.equal(rows, expected)


def backend_and_batch():
    """A backend as ``register`` makes it, over a pool of single tokens, and a fused batch."""
    torch.manual_seed(0)
    keys, values = torch.randn(64, 2, 16), torch.randn(64, 2, 16)
    pool = SimpleNamespace(
        get_key_buffer=lambda _: keys,
        get_value_buffer=lambda _: values,
        set_kv_buffer=lambda *_: pytest.fail("this batch saves nothing"),
    )

    def create_backend(runner):
        return SimpleNamespace(forward_extend=lambda *_, **__: "stock", token_to_kv_pool=pool)

    backend = server_attention._wrap_backend("fa3", create_backend)(SimpleNamespace())
    slots = torch.randperm(64)[:50]
    rows = attention.Rows.single(torch.tensor([3, 4, 20, 49]), slots)
    layer = SimpleNamespace(tp_q_head_num=4, qk_head_dim=16, layer_id=0, scaling=0.25)
    query = torch.randn(4, 64)
    expected = attention.reference(query.view(4, 4, 16), keys[:, None], values[:, None], rows, 0.25)
    return backend, rows, layer, query, expected.reshape(4, 64)


def test_a_batch_without_a_plan_uses_stock_attention():
    backend, _, layer, query, _ = backend_and_batch()
    assert backend.forward_extend(query, None, None, layer, None) == "stock"


def test_a_fused_batch_attends_by_position():
    backend, rows, layer, query, expected = backend_and_batch()
    backend.canopy.fused_attention = server_attention.FusedAttention(rows)
    for _ in range(2):  # the second layer reuses the plan
        output = backend.forward_extend(query, None, None, layer, None)
        assert torch.allclose(output, expected, atol=1e-5)


def test_a_backend_that_cannot_fuse_is_refused_with_those_that_can():
    with pytest.raises(CanopyError, match="torch_native on a CPU, or fa3, flashinfer or triton"):
        DocumentEngine(SimpleNamespace(attn_backend=object()), None)
