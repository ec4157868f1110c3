"""Trees of drafts on a CPU, against SGLang's own reading of a tree and plain formulas."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import canopy_cpu as cpu
from canopy_cpu import ngram
from canopy_cpu.attention import NewTokensAttnBackend

trees = st.integers(1, 7).flatmap(
    lambda size: st.tuples(*[st.integers(0, max(node - 1, 0)) for node in range(size)])
)
"""The parent of each node; node 0 is the root."""


def mask_of(parents: tuple[int, ...]) -> torch.Tensor:
    size = len(parents)
    mask = torch.eye(size, dtype=torch.bool)
    for node in range(1, size):
        mask[node] |= mask[parents[node]]
    return mask


cpu.install()  # SGLang imports kernels by name


def links(masks: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    requests, size = masks.shape[:2]
    made = {
        name: torch.full((requests, size), -7)
        for name in ("positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    }
    ngram.reconstruct_indices_from_tree_mask(
        masks.flatten(), lengths, *made.values(), requests, size
    )
    return made


@settings(max_examples=100, deadline=None)
@given(first=trees, length=st.integers(1, 50))
def test_links_are_sglangs(first, length) -> None:
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    masks = torch.stack([mask_of(first), mask_of(tuple(range(-1, len(first) - 1)))])
    made = links(masks, torch.tensor([length, 3]))
    child, sibling = _derive_tree_links(masks.numpy(), 2, len(first))
    assert torch.equal(made["retrieve_next_token"], child)
    assert torch.equal(made["retrieve_next_sibling"], sibling)
    depth = masks.sum(-1) - 1
    assert torch.equal(made["positions"], depth + torch.tensor([[length], [3]]))
    assert made["retrieve_index"].flatten().tolist() == list(range(2 * len(first)))


@settings(max_examples=200, deadline=None)
@given(parents=trees, data=st.data())
def test_the_longest_path_of_the_models_tokens_is_accepted(parents, data) -> None:
    size = len(parents)
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    said = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    made = links(mask_of(parents)[None], torch.tensor([9]))
    predicts = torch.full((size,), -1)
    accepted, count = torch.full((1, size), -1), torch.zeros(1, dtype=torch.int64)
    ngram.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=count,
        candidates=torch.tensor([tokens]),
        retrive_index=made["retrieve_index"],
        retrive_next_token=made["retrieve_next_token"],
        retrive_next_sibling=made["retrieve_next_sibling"],
        target_predict=torch.tensor([said]),
    )
    path = [0]
    while True:
        below = [
            node
            for node in range(path[-1] + 1, size)
            if parents[node] == path[-1] and tokens[node] == said[path[-1]]
        ]
        if not below:
            break
        path.append(below[0])
    assert accepted[0].tolist() == path + [-1] * (size - len(path))
    assert count.tolist() == [len(path) - 1]
    assert [predicts[node].item() for node in path] == [said[node] for node in path]


def test_slots_are_collected_and_packed() -> None:
    rows = torch.arange(40).view(4, 10).int()
    out = torch.zeros(5, dtype=torch.int64)
    ngram.assign_extend_cache_locs_cpu(
        torch.tensor([3, 1]), rows, torch.tensor([2, 7]), torch.tensor([5, 9]), out, 10
    )
    assert out.tolist() == [32, 33, 34, 17, 18]
    packed = torch.zeros(6, dtype=torch.int64)
    ngram.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [3, -1, -1]]), out, packed)
    assert packed.tolist() == [32, 34, 17, 0, 0, 0]


def test_a_draft_attends_to_the_sequence_and_its_ancestors() -> None:
    heads, kv_heads, size, drafts = 4, 2, 8, 4
    draw = torch.Generator().manual_seed(2)
    keys, values = (torch.randn(64, kv_heads, size, generator=draw) for _ in range(2))
    rows = torch.randperm(64, generator=draw)[:60].view(3, 20).int()
    pool = SimpleNamespace(
        get_key_buffer=lambda layer: keys,
        get_value_buffer=lambda layer: values,
        set_kv_buffer=lambda layer, place, k, v: (
            keys.index_copy_(0, place.loc, k),
            values.index_copy_(0, place.loc, v),
        ),
    )
    runner = SimpleNamespace(
        device="cpu",
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=rows),
    )
    backend = NewTokensAttnBackend(runner)
    masks = torch.stack([mask_of((0, 0, 0, 2)), mask_of((0, 0, 1, 0))])
    lengths, members = torch.tensor([7, 12]), torch.tensor([2, 0])
    places = torch.cat([rows[r, n : n + drafts] for r, n in zip([2, 0], [7, 12])]).long()
    batch = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        out_cache_loc=places,
        req_pool_indices=members,
        seq_lens=lengths,
        spec_info=SimpleNamespace(custom_mask=masks.flatten(), draft_token_num=drafts),
    )
    layer = SimpleNamespace(
        layer_id=0,
        qk_head_dim=size,
        v_head_dim=size,
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        scaling=0.3,
        sliding_window_size=-1,
    )
    query = torch.randn(2 * drafts, heads * size, generator=draw)
    new = [torch.randn(2 * drafts, kv_heads, size, generator=draw) for _ in range(2)]
    backend.init_forward_metadata(batch)
    answer = backend.forward_extend(query, *new, layer, batch).view(2, drafts, heads, size)
    for request, (row, length) in enumerate(zip([2, 0], [7, 12])):
        for node in range(drafts):
            above = torch.nonzero(masks[request, node]).flatten() + length
            seen = torch.cat([torch.arange(length), above])
            slots = rows[row, seen].long()
            q = query.view(2, drafts, heads, size)[request, node]
            k, v = (cache[slots].repeat_interleave(2, 1) for cache in (keys, values))
            weights = (torch.einsum("hd,thd->ht", q, k) * 0.3).softmax(-1)
            expected = torch.einsum("ht,thd->hd", weights, v)
            assert torch.allclose(answer[request, node], expected, atol=1e-5)


def test_sglang_finds_the_kernels() -> None:
    from sglang.kernels.ops.speculative import cache_locs, eagle, reconstruct_tree, spec_tree

    assert spec_tree.sgl_verify_tree_greedy_cpu is ngram.verify_tree_greedy_cpu
    assert cache_locs.assign_extend_cache_locs_cpu is ngram.assign_extend_cache_locs_cpu
    assert eagle.fill_accept_out_cache_loc_cpu is ngram.fill_accept_out_cache_loc_cpu
    given = (torch.ones(1, dtype=torch.bool), torch.tensor([4]), *torch.zeros(4, 1).long())
    reconstruct_tree.reconstruct_indices_from_tree_mask_func(*given, 1, 1)
    assert given[2].tolist() == [4]
    assert np.array_equal(given[4].numpy(), [-1])
