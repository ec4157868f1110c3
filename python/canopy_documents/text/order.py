"""Order a prompt's documents so that a prefix cache already holds its prefix.

For requests whose documents may be in any order (``canopy_order``). The result is exact: the prompt
is computed as if the client had sent this order. The method is that of ContextPilot (arXiv
2511.03475), but uses the tenant's own earlier orders instead of an index. The documents continue
the earlier order with the longest common prefix; the rest follow by frequency, so that later
prompts share them. The same documents after the same text, as in the next turn, get the same order
again.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from canopy_documents.text import fields
from canopy_documents.text.fields import Bounds

MAX_ORDERS = 1 << 12
"""Maximum number of orders remembered, over all tenants."""
MAX_TENANT_ORDERS = 1 << 9
"""Maximum number of one tenant's orders; each of its prompts is compared with all of them."""
NEW_SHARE = 0.25
"""Share of the memory for tenants whose prompts have not yet continued an earlier order."""
MIN_ORDER_SIZE = 32
"""Documents that an order counts as at least. Fewer orders are remembered if they are longer."""
MAX_GAP = 16
"""Maximum tokens between two documents of a list. Longer text may refer to its neighbours."""

Hashes = tuple[int, ...]
"""Hashes of documents, in order."""
Document = tuple[int, ...] | str
"""A document's tokens or text."""


@dataclass(slots=True)
class _TenantOrders:
    """One tenant's orders, by the hash of the preceding text, least recently used first."""

    orders: OrderedDict[tuple[int, Hashes], None] = field(default_factory=OrderedDict)
    uses: Counter[int] = field(default_factory=Counter)
    size: int = 0
    matches: int = 0

    def forget_oldest(self) -> int:
        """Forget the oldest order. Returns its size."""
        (_, hashes), _ = self.orders.popitem(last=False)
        self.uses.subtract(hashes)
        if len(self.uses) > 2 * MAX_TENANT_ORDERS * MIN_ORDER_SIZE:
            self.uses = +self.uses
        self.size -= size_of(hashes)
        return size_of(hashes)


def size_of(hashes: Hashes) -> int:
    """Return the size of an order: its documents, but at least ``MIN_ORDER_SIZE``."""
    return max(MIN_ORDER_SIZE, len(hashes))


class Orders:
    """Earlier orders of documents, by tenant. If they exceed ``limit`` orders of ``MIN_ORDER_SIZE``
    documents, one tenant drops its oldest (:meth:`_tenant_to_shrink`)."""

    def __init__(self, limit: int = MAX_ORDERS, tenant_limit: int = MAX_TENANT_ORDERS) -> None:
        self.max_size, self.max_tenant_size = limit * MIN_ORDER_SIZE, tenant_limit * MIN_ORDER_SIZE
        self.by_tenant: dict[str | None, _TenantOrders] = {}
        self.size = 0

    def arrange(
        self,
        ids: Sequence[int],
        bounds: Bounds,
        tenant: str | None,
        template_tokens: frozenset[int] = frozenset(),
    ) -> tuple[list[int], Bounds]:
        """Return the prompt with each list of documents in the best order, and the new bounds.

        A list is consecutive documents with the same text, of at most ``MAX_GAP`` tokens, between
        them. Documents never change lists: the documents of a later turn stay after the earlier
        turns. template_tokens: tokens of a chat template, which are in no list.
        """
        out_ids: list[int] = []
        arranged: list[tuple[int, int]] = []
        copied = hashed = text_hash = 0
        for run in _split_lists(ids, bounds, template_tokens):
            first, end = run[0][0], run[-1][1]
            out_ids += ids[copied:first]
            documents = [tuple(ids[a:b]) for a, b in run]
            gap = ids[run[0][1] : run[1][0]] if len(run) > 1 else []
            if len(run) > 1:  # each token is hashed once, for any number of lists
                text_hash, hashed = hash((text_hash, tuple(out_ids[hashed:]))), len(out_ids)
            for number, i in enumerate(self.choose_order(text_hash, documents, tenant)):
                out_ids += gap if number else []
                arranged.append((len(out_ids), len(out_ids) + len(documents[i])))
                out_ids += documents[i]
            copied = end
        return [*out_ids, *ids[copied:]], tuple(arranged)

    def choose_order(
        self, text_hash: int, documents: Sequence[Document], tenant: str | None
    ) -> list[int]:
        """Return the order of documents after a text with the hash ``text_hash``, and record it."""
        if len(documents) < 2:
            return list(range(len(documents)))
        history = self.by_tenant.setdefault(tenant, _TenantOrders())
        hashes = [hash(document) for document in documents]
        remaining: dict[int, list[int]] = {}
        for i in reversed(range(len(hashes))):
            remaining.setdefault(hashes[i], []).append(i)
        prefix = self._longest_prefix(history, text_hash, documents, hashes)
        order = [remaining[h].pop() for h in prefix]
        history.matches += bool(order)
        missing = set(range(len(hashes))) - set(order)
        order += sorted(missing, key=lambda i: -history.uses[hashes[i]])
        self._record(history, (text_hash, tuple(hashes[i] for i in order)))
        return order

    def _longest_prefix(
        self,
        history: _TenantOrders,
        text_hash: int,
        documents: Sequence[Document],
        hashes: Sequence[int],
    ) -> Hashes:
        """Return the longest prefix, in tokens or characters, of an earlier order that has only documents of the
        prompt.

        Of equal prefixes, an order without other documents is preferred, then the latest.
        """
        tokens, counts = dict(zip(hashes, map(len, documents))), Counter(hashes)
        best_score: tuple[int, bool] = 0, False
        longest: Hashes = ()
        for earlier, order in history.orders:
            if earlier != text_hash or order[0] not in counts:
                continue
            remaining, count = counts.copy(), 0
            while count < len(order) and remaining[order[count]] > 0:
                remaining[order[count]] -= 1
                count += 1
            score = sum(tokens[h] for h in order[:count]), count == len(order)
            if score >= best_score:
                best_score, longest = score, order[:count]
        return longest

    def _record(self, history: _TenantOrders, key: tuple[int, Hashes]) -> None:
        if key in history.orders:
            history.orders.move_to_end(key)
            return
        history.orders[key] = None
        history.uses.update(key[1])
        history.size += size_of(key[1])
        self.size += size_of(key[1])
        while history.size > self.max_tenant_size or self.size > self.max_size:
            largest = history if history.size > self.max_tenant_size else self._tenant_to_shrink()
            self.size -= largest.forget_oldest()
            if not largest.orders:
                self.by_tenant = {t: h for t, h in self.by_tenant.items() if h.orders}

    def _tenant_to_shrink(self) -> _TenantOrders:
        """Return the tenant that drops an order when the memory is full.

        It has the most orders per match. Tenants without a match share ``NEW_SHARE``, since a
        client can invent a tenant with a single prompt.
        """
        tenants = self.by_tenant.values()
        unmatched = [history for history in tenants if not history.matches]
        if sum(history.size for history in unmatched) > self.max_size * NEW_SHARE:
            return max(unmatched, key=lambda history: history.size)
        matched = (history for history in tenants if history.matches)
        return max(matched, key=lambda history: history.size / history.matches)


def _split_lists(
    ids: Sequence[int], bounds: Bounds, template_tokens: frozenset[int]
) -> list[list[tuple[int, int]]]:
    """Return the lists of documents of a prompt."""
    lists: list[list[tuple[int, int]]] = [[pair] for pair in bounds[:1]]
    gap: Sequence[int] | None = None
    for (begin, end), pair in pairwise(bounds):
        between = ids[end : pair[0]]
        if (
            len(between) <= MAX_GAP
            and (len(lists[-1]) == 1 or between == gap)
            and template_tokens.isdisjoint(ids[begin : pair[1]])
        ):
            lists[-1].append(pair)
            gap = between
        else:
            lists.append([pair])
    return lists


orders = Orders()
"""Orders of documents in earlier prompts of this process."""

OTHER_INPUT = ("image_data", "video_data", "audio_data", "input_embeds")
"""Request fields with input other than text."""
_BY_POSITION = (
    *("positional_embed_overrides", "session_params", "multi_item_delimiter_indices"),
    *("token_indices_to_pool", "return_routed_experts", "return_hidden_states"),
)
"""Request fields whose meaning depends on token positions."""


def has_other_input(obj: Any) -> bool:
    """Return whether a request has input other than text."""
    return any(getattr(obj, name, None) is not None for name in OTHER_INPUT)


def has_fixed_positions(obj: Any) -> bool:
    """Return whether another part of a request, such as an image or the start of prompt logprobs,
    refers to positions in the prompt as sent."""
    if any(getattr(obj, name, None) for name in _BY_POSITION) or has_other_input(obj):
        return True
    start = getattr(obj, "logprob_start_len", None)
    starts = start if isinstance(start, list) else [start]
    return any(start not in (None, -1) for start in starts)


def arrange_ids(
    tokenizer: Any, ids: list[int], bounds: fields.Bounds, tenant: str | None
) -> tuple[list[int], list[int]]:
    """Return a prompt's tokens with its documents in the best order, and their flat bounds."""
    if all(isinstance(token, int) for token in ids):
        ids, bounds = orders.arrange(ids, bounds, tenant, _tokens_of_templates(tokenizer))
    return ids, [position for pair in bounds for position in pair]


@functools.lru_cache(maxsize=1)
def _tokens_of_templates(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that chat templates use as separators: special and added tokens."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return frozenset([*getattr(tokenizer, "all_special_ids", ()), *added.values()])
