"""Attention over the new tokens only, for SGLang's `torch_native` backend.

SGLang pads every request's query to the whole sequence, so a cached prefix saves no attention work:
60 new tokens after 4,000 cached tokens cost as much as 4,060 new tokens. Here the query is the new
tokens alone. Slots, masks and groups of a batch are computed once and shared by all layers. Results
equal the stock results up to rounding.

The stock code runs cross-attention, encoder-only attention and sliding windows. If layers with
sliding windows have their own KV pool, slots are translated to it: the stock code reads that pool
with the slots of the other pool.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 512
"""Queries of a block, which attends up to its own last token. Longer blocks waste more of the causal
triangle; shorter blocks need more calls."""
PADDING_PER_CALL = 64
"""Tokens of padding that cost about as much as a separate call."""


@dataclass(slots=True, frozen=True)
class QueryBlock:
    """Queries `start:end` of the batch; they attend to the request's first `visible_tokens`."""

    start: int
    end: int
    visible_tokens: int
    mask: torch.Tensor | None  # bool [end - start, visible_tokens]; None: plain causal from token 0


@dataclass(slots=True, frozen=True)
class ExtendRequest:
    """A request's cache slots [tokens] and its queries."""

    slots: torch.Tensor
    blocks: list[QueryBlock]


@dataclass(slots=True, frozen=True)
class DecodeGroup:
    """Requests of similar length decoded in one call.

    `members` [requests]; `slots` [requests * length_tokens], short requests padded with one of their
    own slots; `mask` bool [requests, 1, 1, length_tokens], or None without padding.
    """

    members: torch.Tensor
    slots: torch.Tensor
    length_tokens: int
    mask: torch.Tensor | None


def plan_extend(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
) -> list[ExtendRequest]:
    """Plan the attention of new tokens: one entry per request. Arguments are SGLang's."""
    requests, query_start = [], 0
    for pool_index, length, new_tokens in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist()
    ):
        cached_tokens = length - new_tokens
        step = QUERY_BLOCK if cached_tokens else max(new_tokens, 1)
        blocks = []
        for first in range(0, new_tokens, step):
            end = min(first + step, new_tokens)
            visible_tokens = cached_tokens + end
            mask = None
            if cached_tokens or first:
                mask = torch.ones(end - first, visible_tokens, dtype=torch.bool)
                mask.tril_(cached_tokens + first)
            blocks.append(QueryBlock(query_start + first, query_start + end, visible_tokens, mask))
        requests.append(ExtendRequest(req_to_token[pool_index, :length], blocks))
        query_start += new_tokens
    return requests


def plan_decode(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> list[DecodeGroup]:
    """Plan a decode step: groups of requests of similar length. Arguments are SGLang's."""
    pool_indices, lengths = req_pool_indices.tolist(), seq_lens.tolist()
    groups = []
    for members in group_by_length(lengths):
        group_length = lengths[members[-1]]
        slots = req_to_token[[pool_indices[i] for i in members], :group_length]
        mask = None
        if lengths[members[0]] < group_length:
            is_real_token = (
                torch.arange(group_length) < torch.tensor([lengths[i] for i in members])[:, None]
            )
            slots = torch.where(is_real_token, slots, slots[:, :1])
            mask = is_real_token[:, None, None]
        groups.append(DecodeGroup(torch.tensor(members), slots.flatten(), group_length, mask))
    return groups


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Return the indices of requests to decode together, shortest first: padding costs less than it
    saves.

    >>> group_by_length([300, 4000, 310])
    [[0, 2], [1]]
    """
    groups: list[list[int]] = []
    padding_tokens = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups:
            grown_padding_tokens = padding_tokens + len(groups[-1]) * (
                lengths[index] - lengths[groups[-1][-1]]
            )
            if grown_padding_tokens <= PADDING_PER_CALL * len(groups[-1]):
                groups[-1].append(index)
                padding_tokens = grown_padding_tokens
                continue
        groups.append([index])
        padding_tokens = 0
    return groups


class NewTokensAttnBackend(TorchNativeAttnBackend):
    """`torch_native`, with attention computed for the new tokens only.

    A plan is kept until the next `init_forward_metadata`, that is for all layers of one forward
    pass. Without that call, every layer makes its own plan.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._plan: Any = None
        self._plan_key: tuple[Any, Any] | None = None
        """``req_pool_indices`` and ``seq_lens`` of the batch of ``_plan``."""
        self._uses_window_pool = False
        """Whether the current layer has its KV in the pool of sliding windows."""
        self._window_slots: tuple[torch.Tensor, torch.Tensor] | None = None
        """``req_pool_indices`` of the batch, and its slots in that pool [requests, tokens]."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._plan = self._window_slots = None
        self._plan_key = (forward_batch.req_pool_indices, forward_batch.seq_lens)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        self._uses_window_pool = self._layer_has_window_pool(layer)
        return super().forward_extend(q, k, v, layer, *args, **kwargs)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        self._uses_window_pool = self._layer_has_window_pool(layer)
        return super().forward_decode(q, k, v, layer, *args, **kwargs)

    def _layer_has_window_pool(self, layer: Any) -> bool:
        return (
            self.use_sliding_window_kv_pool
            and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        )

    def _translate_slots(self, call: SimpleNamespace) -> dict[str, Any]:
        """Return the arguments with slots of the sliding windows' pool, row ``i`` for request ``i``.

        Slots of tokens outside every window may have been reused; the mask hides them.
        """
        indices, slots = self._window_slots or (None, None)
        if slots is None or indices is not call.req_pool_indices:
            slots = call.req_to_token[call.req_pool_indices, : int(call.seq_lens.max())]
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots.long())
            slots = slots.clamp_(min=0)
            self._window_slots = call.req_pool_indices, slots
        requests = torch.arange(len(slots), device=slots.device)
        return {**vars(call), "req_to_token": slots, "req_pool_indices": requests}

    def _run_sdpa_forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Fill `output` [new tokens, heads, head size]; the arguments are upstream's."""
        call = _bind_arguments(_EXTEND_PARAMETERS, args, kwargs)
        if self._uses_window_pool:
            return super()._run_sdpa_forward_extend(**self._translate_slots(call))
        if not call.causal or _needs_stock_code(call):
            return super()._run_sdpa_forward_extend(*args, **kwargs)
        requests = self._get_plan(
            call,
            lambda: plan_extend(
                call.req_to_token, call.req_pool_indices, call.seq_lens, call.extend_seq_lens
            ),
        )
        _attend(
            requests,
            call.query,
            call.output,
            call.k_cache,
            call.v_cache,
            scale=call.scaling,
            enable_gqa=call.enable_gqa,
        )
        return call.output  # type: ignore[no-any-return]

    def _run_sdpa_forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Fill `output` [requests, heads, head size]; the arguments are upstream's."""
        call = _bind_arguments(_DECODE_PARAMETERS, args, kwargs)
        if self._uses_window_pool:
            return super()._run_sdpa_forward_decode(**self._translate_slots(call))
        if _needs_stock_code(call):
            return super()._run_sdpa_forward_decode(*args, **kwargs)
        query, output, k_cache = call.query, call.output, call.k_cache
        groups = self._get_plan(
            call, lambda: plan_decode(call.req_to_token, call.req_pool_indices, call.seq_lens)
        )
        kv_heads = k_cache.shape[1]
        for group in groups:
            count = len(group.members)
            # Heads that share a KV head become queries of that head, without copies of K and V.
            queries = query[group.members].view(count, kv_heads, -1, query.shape[-1])
            attended = scaled_dot_product_attention(
                queries,
                _gather(k_cache, group, count).to(query.dtype),
                _gather(call.v_cache, group, count).to(query.dtype),
                attn_mask=group.mask,
                scale=call.scaling,
            )
            output[group.members] = attended.reshape(count, *output.shape[1:])
        return output

    def _get_plan(self, call: Any, make_plan: Callable[[], Any]) -> Any:
        """Return the result of ``make_plan``, which is called once for all layers of a batch."""
        indices, lengths = self._plan_key or (None, None)
        if indices is not call.req_pool_indices or lengths is not call.seq_lens:
            return make_plan()
        if self._plan is None:
            self._plan = make_plan()
        return self._plan


_EXTEND_PARAMETERS, _DECODE_PARAMETERS = (
    tuple(inspect.signature(getattr(TorchNativeAttnBackend, name)).parameters)[1:]
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode")
)
_DEFAULTS = {
    **dict.fromkeys(("encoder_lens", "scaling", "sliding_window_size")),
    **dict.fromkeys(("enable_gqa", "causal", "is_cross_attn"), False),
}


def _bind_arguments(names: Sequence[str], args: Any, kwargs: Any) -> SimpleNamespace:
    """Return a call's arguments by SGLang's names (checked by `canopy_cpu.install`)."""
    return SimpleNamespace(**{**_DEFAULTS, **dict(zip(names, args)), **kwargs})


def _needs_stock_code(call: SimpleNamespace) -> bool:
    """Return whether stock code must run: cross-attention, encoder lengths, sliding windows."""
    window = call.sliding_window_size
    return (
        call.encoder_lens is not None or call.is_cross_attn or (window is not None and window > -1)
    )


def _attend(
    requests: list[ExtendRequest],
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    **options: Any,
) -> None:
    """Fill ``output`` [queries, heads, head size]; the caches are [slots, kv heads, head size]."""
    for request in requests:
        keys = k_cache.index_select(0, request.slots).transpose(0, 1)[None].to(query.dtype)
        values = v_cache.index_select(0, request.slots).transpose(0, 1)[None].to(query.dtype)
        for block in request.blocks:
            attended = scaled_dot_product_attention(
                query[block.start : block.end].transpose(0, 1)[None],
                keys[:, :, : block.visible_tokens],
                values[:, :, : block.visible_tokens],
                attn_mask=block.mask,
                is_causal=block.mask is None,
                **options,
            )
            output[block.start : block.end] = attended[0].transpose(0, 1)


def _gather(cache: torch.Tensor, group: DecodeGroup, count: int) -> torch.Tensor:
    """Gather [count, kv heads, length, head size] from the cache [slots, kv heads, head size]."""
    gathered = cache.index_select(0, group.slots)
    return gathered.view(count, group.length_tokens, *cache.shape[1:]).transpose(1, 2)
