"""The CPU backend's attention, compared with SGLang's stock functions on the same random batches."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from canopy_cpu import attention
from canopy_cpu.attention import NewTokensAttnBackend, group_by_length

HEAD_SIZE = 32
POOL_ROWS = 16


def make_batch(lengths, new_lengths, heads, kv_heads, dtype=torch.float32, seed=0):
    """Random caches with every request's rows scattered, and queries for the new tokens."""
    generator = torch.Generator().manual_seed(seed)
    slots = sum(lengths) + 7

    def random_tensor(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    slot_order = torch.randperm(slots, generator=generator)
    req_to_token = torch.zeros(POOL_ROWS, max(lengths) + 3, dtype=torch.int32)
    rows = torch.randperm(POOL_ROWS, generator=generator)[: len(lengths)]
    first_slot = 0
    for row, length in zip(rows.tolist(), lengths):
        req_to_token[row, :length] = slot_order[first_slot : first_slot + length].int()
        first_slot += length
    query = random_tensor(sum(new_lengths), heads, HEAD_SIZE)
    return {
        "query": query,
        "output": torch.full_like(query, float("nan")),
        "k_cache": random_tensor(slots, kv_heads, HEAD_SIZE),
        "v_cache": random_tensor(slots, kv_heads, HEAD_SIZE),
        "req_to_token": req_to_token,
        "req_pool_indices": rows,
        "seq_lens": torch.tensor(lengths),
        "scaling": HEAD_SIZE**-0.5,
        "enable_gqa": heads != kv_heads,
    }


def fake_runner():
    return SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)


def extend(backend_class, batch, new_lengths, **options):
    new_counts = torch.tensor(new_lengths)
    arguments = {
        **batch,
        "output": batch["output"].clone(),
        "extend_seq_lens": new_counts,
        "extend_prefix_lens": batch["seq_lens"] - new_counts,
        "causal": True,
        **options,
    }
    return backend_class(fake_runner())._run_sdpa_forward_extend(**arguments)


def decode(backend_class, batch, **options):
    arguments = {**batch, "output": batch["output"].clone(), **options}
    return backend_class(fake_runner())._run_sdpa_forward_decode(**arguments)


def assert_close(output, expected):
    assert not torch.isnan(output).any()
    assert (output - expected).abs().max().item() <= 1e-5


request_sizes = st.lists(
    st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=6
)  # (cached, new) tokens
head_counts = st.sampled_from([(4, 4), (9, 3), (8, 1), (6, 2)])


@settings(max_examples=60, deadline=None)
@given(requests=request_sizes, heads=head_counts, seed=st.integers(0, 2**16))
def test_extend_equals_stock_on_mixed_batches(requests, heads, seed):
    lengths = [cached + new for cached, new in requests]
    new_lengths = [new for _, new in requests]
    batch = make_batch(lengths, new_lengths, *heads, seed=seed)
    output = extend(NewTokensAttnBackend, batch, new_lengths)
    assert_close(output, extend(TorchNativeAttnBackend, batch, new_lengths))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=10),
    heads=head_counts,
    seed=st.integers(0, 2**16),
)
def test_decode_equals_stock_on_mixed_batches(lengths, heads, seed):
    batch = make_batch(lengths, [1] * len(lengths), *heads, seed=seed)
    assert_close(decode(NewTokensAttnBackend, batch), decode(TorchNativeAttnBackend, batch))


@pytest.mark.parametrize("cached_tokens", [0, 5, 700])
def test_extend_longer_than_a_query_block_equals_stock(cached_tokens):
    new_tokens = attention.QUERY_BLOCK * 2 + 17
    batch = make_batch([cached_tokens + new_tokens, 40], [new_tokens, 1], 4, 2)
    output = extend(NewTokensAttnBackend, batch, [new_tokens, 1])
    assert_close(output, extend(TorchNativeAttnBackend, batch, [new_tokens, 1]))


def test_a_cache_of_another_dtype_is_read_like_stock():
    batch = make_batch([50, 80], [10, 1], 4, 2)
    for name in ("k_cache", "v_cache"):
        batch[name] = batch[name].to(torch.bfloat16)
    assert_close(
        extend(NewTokensAttnBackend, batch, [10, 1]), extend(TorchNativeAttnBackend, batch, [10, 1])
    )
    batch = {**batch, "query": batch["query"][:2], "output": batch["output"][:2]}
    assert_close(decode(NewTokensAttnBackend, batch), decode(TorchNativeAttnBackend, batch))


@pytest.mark.parametrize(
    "options",
    [{"causal": False}, {"sliding_window_size": 16}],
    ids=["encoder only", "sliding window"],
)
def test_attention_that_is_not_plain_causal_uses_the_stock_path(options):
    batch = make_batch([60, 33], [60, 33], 4, 2)
    output = extend(NewTokensAttnBackend, batch, [60, 33], **options)
    expected = extend(TorchNativeAttnBackend, batch, [60, 33], **options)
    assert torch.equal(output, expected)


def test_a_sliding_window_decodes_like_stock():
    batch = make_batch([60, 33], [1, 1], 4, 2)
    output = decode(NewTokensAttnBackend, batch, sliding_window_size=16)
    assert torch.equal(output, decode(TorchNativeAttnBackend, batch, sliding_window_size=16))


def test_layers_of_one_forward_share_a_plan_and_the_next_forward_makes_its_own(monkeypatch):
    plans = []
    original = attention.plan_decode
    monkeypatch.setattr(attention, "plan_decode", lambda *args: plans.append(1) or original(*args))
    backend = NewTokensAttnBackend(fake_runner())
    batch = make_batch([30, 60], [1, 1], 4, 2)
    forward = SimpleNamespace(
        req_pool_indices=batch["req_pool_indices"], seq_lens=batch["seq_lens"], out_cache_loc=None
    )
    for _forward in range(2):
        backend.init_forward_metadata(forward)
        for _layer in range(3):
            backend._run_sdpa_forward_decode(**batch)
    assert len(plans) == 2

    # Same tensors, one token further: a stale plan would miss the token.
    batch["seq_lens"] += 1
    batch["req_to_token"][batch["req_pool_indices"], batch["seq_lens"] - 1] = 3
    backend.init_forward_metadata(forward)
    output = backend._run_sdpa_forward_decode(**{**batch, "output": batch["output"].clone()})
    assert_close(output, decode(TorchNativeAttnBackend, batch))


def test_requests_of_similar_length_are_decoded_together():
    assert group_by_length([300, 4000, 310]) == [[0, 2], [1]]
    assert group_by_length([5, 5, 5]) == [[0, 1, 2]]
    assert group_by_length([1, 1000, 2000]) == [[0], [1], [2]]


@given(st.lists(st.integers(1, 5000), max_size=40))
def test_every_request_is_in_one_group_and_padding_is_bounded(lengths):
    groups = group_by_length(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        padding = sum(longest - lengths[i] for i in group)
        assert padding <= attention.PADDING_PER_CALL * len(group)
