"""Sliding windows with a pool of their own, and causal convolutions, compared with plain formulas."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from canopy_cpu import short_conv
from canopy_cpu.attention import NewTokensAttnBackend

HEADS, KV_HEADS, HEAD_SIZE, WINDOW_TOKENS, SLOTS = 4, 2, 8, 6, 96
SLIDING, FULL = 0, 1
"""Ids of the layer with a sliding window and of the layer with full attention."""


class SlidingWindowPools:
    """SGLang's two pools and its allocator, and requests whose KV is in them."""

    def __init__(self) -> None:
        pool = SWAKVPool(
            size=SLOTS,
            size_swa=SLOTS,
            page_size=1,
            dtype=torch.float32,
            head_num=KV_HEADS,
            head_dim=HEAD_SIZE,
            swa_attention_layer_ids=[SLIDING],
            full_attention_layer_ids=[FULL],
            device="cpu",
        )
        self.allocator = SWATokenToKVPoolAllocator(
            SLOTS, SLOTS, 1, torch.float32, "cpu", pool, need_sort=False
        )
        self.rows = torch.zeros(8, SLOTS, dtype=torch.int32)
        runner = SimpleNamespace(
            device="cpu",
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=self.rows),
        )
        self.backend = NewTokensAttnBackend(runner)
        self.generator = torch.Generator().manual_seed(5)
        # The two pools hand out different slots from here on.
        self.allocator.free(self.allocator.alloc(3))
        held_slots = self.allocator.alloc(5)
        self.allocator.free_swa(held_slots[:4])
        self.kv: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {SLIDING: {}, FULL: {}}

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def step(self, layer: int, requests: dict[int, int], slots: dict[int, torch.Tensor], is_decode):
        """Run the new tokens by row through ``layer``; return the output and the formula's output."""
        lengths, new_kv = [], []
        for row, new_tokens in requests.items():
            key, value = (self.randn(new_tokens, KV_HEADS, HEAD_SIZE) for _ in range(2))
            old_kv = self.kv[layer].get(row)
            all_kv = (key, value)
            if old_kv is not None:
                all_kv = tuple(torch.cat(tensors) for tensors in zip(old_kv, all_kv))
            self.kv[layer][row] = all_kv
            lengths.append(len(all_kv[0]))
            new_kv.append((key, value))
        query = self.randn(sum(requests.values()), HEADS * HEAD_SIZE)
        new_lengths = torch.tensor(list(requests.values()))
        batch = SimpleNamespace(
            out_cache_loc=torch.cat([slots[row] for row in requests]),
            req_pool_indices=torch.tensor(list(requests)),
            seq_lens=torch.tensor(lengths),
            extend_seq_lens=new_lengths,
            extend_prefix_lens=torch.tensor(lengths) - new_lengths,
            encoder_lens=None,
            forward_mode=None,
        )
        attention = SimpleNamespace(
            layer_id=layer,
            qk_head_dim=HEAD_SIZE,
            v_head_dim=HEAD_SIZE,
            tp_q_head_num=HEADS,
            tp_k_head_num=KV_HEADS,
            scaling=HEAD_SIZE**-0.5,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
            sliding_window_size=WINDOW_TOKENS if layer == SLIDING else -1,
        )
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if is_decode else self.backend.forward_extend
        key, value = (torch.cat(tensors) for tensors in zip(*new_kv))
        output = forward(query, key, value, attention, batch)
        return output.view(-1, HEADS, HEAD_SIZE), self._formula(layer, requests, query)

    def _formula(self, layer, requests, query) -> torch.Tensor:
        window = WINDOW_TOKENS if layer == SLIDING else 10**6
        outputs, row_index = [], 0
        for row, new_tokens in requests.items():
            keys, values = self.kv[layer][row]
            for position in range(len(keys) - new_tokens, len(keys)):
                q = query[row_index].view(HEADS, HEAD_SIZE)
                first_position = max(0, position - window)
                k = keys[first_position : position + 1].repeat_interleave(HEADS // KV_HEADS, 1)
                v = values[first_position : position + 1].repeat_interleave(HEADS // KV_HEADS, 1)
                weights = (torch.einsum("hd,thd->ht", q, k) * HEAD_SIZE**-0.5).softmax(-1)
                outputs.append(torch.einsum("ht,thd->hd", weights, v))
                row_index += 1
        return torch.stack(outputs)


@pytest.mark.parametrize("layer", [SLIDING, FULL])
def test_layers_of_both_pools_read_their_own_slots(layer) -> None:
    pools = SlidingWindowPools()
    lengths: dict[int, int] = {}
    for counts, is_decode in (({2: 11, 5: 3}, False), ({2: 4, 5: 9}, False), ({2: 1, 5: 1}, True)):
        slots = {}
        for row, tokens in counts.items():
            slots[row] = pools.allocator.alloc(tokens)
            start = lengths.get(row, 0)
            pools.rows[row, start : start + tokens] = slots[row].int()
            lengths[row] = start + tokens
        answer, formula = pools.step(layer, counts, slots, is_decode)
        assert (answer - formula).abs().max() < 1e-5


def test_slots_outside_the_window_may_be_freed() -> None:
    pools = SlidingWindowPools()
    slots = pools.allocator.alloc(20)
    pools.rows[3, :20] = slots.int()
    pools.step(SLIDING, {3: 20}, {3: slots}, False)
    pools.allocator.free_swa(slots[: 20 - WINDOW_TOKENS - 1])
    new_slot = pools.allocator.alloc(1)
    pools.rows[3, 20:21] = new_slot.int()
    answer, formula = pools.step(SLIDING, {3: 1}, {3: new_slot}, True)
    assert (answer - formula).abs().max() < 1e-5


@settings(max_examples=40, deadline=None)
@given(
    piece_sizes=st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=4),
    width=st.sampled_from([2, 3, 4]),
    has_bias=st.booleans(),
    activation=st.sampled_from([None, "silu"]),
)
def test_a_convolution_in_pieces_equals_the_whole(piece_sizes, width, has_bias, activation) -> None:
    generator = torch.Generator().manual_seed(3)
    channels, requests = 5, 3
    weight = torch.randn(channels, width, generator=generator)
    bias = torch.randn(channels, generator=generator) if has_bias else None
    states = torch.full((8, channels, width - 1), float("nan"))
    slots = torch.tensor([6, 0, 3])
    inputs = [torch.zeros(channels, 0) for _ in range(requests)]
    outputs = [torch.zeros(channels, 0) for _ in range(requests)]
    for counts in piece_sizes:
        new_inputs = [torch.randn(channels, count, generator=generator) for count in counts]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
        result = short_conv.causal_conv1d_fn(
            torch.cat(new_inputs, 1),
            weight,
            bias,
            query_start_loc=starts,
            cache_indices=slots,
            has_initial_state=torch.tensor([sequence.shape[1] > 0 for sequence in inputs]),
            conv_states=states,
            activation=activation,
        )
        for request, piece in enumerate(result.split(counts, 1)):
            inputs[request] = torch.cat([inputs[request], new_inputs[request]], 1)
            outputs[request] = torch.cat([outputs[request], piece], 1)
    has_state = torch.tensor([sequence.shape[1] > 0 for sequence in inputs])
    for _ in range(3):
        new_tokens = torch.randn(requests, channels, generator=generator)
        indices = torch.where(has_state, slots, short_conv.PAD_SLOT)
        result = short_conv.causal_conv1d_update(
            new_tokens, states, weight, bias, activation, conv_state_indices=indices
        )
        for request in range(requests):
            if has_state[request]:
                inputs[request] = torch.cat([inputs[request], new_tokens[request][:, None]], 1)
                outputs[request] = torch.cat([outputs[request], result[request][:, None]], 1)
    for sequence, pieces in zip(inputs, outputs):
        padded = torch.nn.functional.pad(sequence, (width - 1, 0))
        for position in range(sequence.shape[1]):
            expected = (padded[:, position : position + width] * weight).sum(1)
            expected = expected if bias is None else expected + bias
            expected = torch.nn.functional.silu(expected) if activation else expected
            assert torch.allclose(pieces[:, position], expected, atol=1e-5)
