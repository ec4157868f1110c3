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
NAMES = 32
"""Documents of an order that uses its full share of the memory. Fewer longer orders are kept."""
MAX_GAP = 16
"""Maximum tokens between two documents of a list. Longer text may refer to its neighbours."""

Names = tuple[int, ...]
"""Hashes of documents, in order."""
Document = tuple[int, ...] | str
"""A document's tokens or text."""


@dataclass(slots=True)
class _TenantOrders:
    """One tenant's orders, by the hash of the preceding text, least recently used first."""

    orders: OrderedDict[tuple[int, Names], None] = field(default_factory=OrderedDict)
    uses: Counter[int] = field(default_factory=Counter)
    size: int = 0
    matches: int = 0

    def forget_oldest(self) -> int:
        """Forget the oldest order. Returns its size."""
        (_, names), _ = self.orders.popitem(last=False)
        self.uses.subtract(names)
        if len(self.uses) > 2 * MAX_TENANT_ORDERS * NAMES:
            self.uses = +self.uses
        self.size -= size_of(names)
        return size_of(names)


def size_of(names: Names) -> int:
    """Return the size of an order: its documents, but at least ``NAMES``."""
    return max(NAMES, len(names))


class Orders:
    """Earlier orders of documents, by tenant. If they exceed ``most`` orders of ``NAMES``
    documents, one tenant drops its oldest (:meth:`_largest`)."""

    def __init__(self, most: int = MAX_ORDERS, most_own: int = MAX_TENANT_ORDERS) -> None:
        self.most, self.most_own = most * NAMES, most_own * NAMES
        self.by_tenant: dict[str | None, _TenantOrders] = {}
        self.size = 0

    def arrange(
        self,
        ids: Sequence[int],
        bounds: Bounds,
        tenant: str | None,
        turns: frozenset[int] = frozenset(),
    ) -> tuple[list[int], Bounds]:
        """Return the prompt with each list of documents in the best order, and the new bounds.

        A list is consecutive documents with the same text, of at most ``MAX_GAP`` tokens, between
        them. Documents never change lists: the documents of a later turn stay after the earlier
        turns. turns: tokens of a template, which are in no list.
        """
        out: list[int] = []
        arranged: list[tuple[int, int]] = []
        copied = hashed = prefix_hash = 0
        for run in _lists(ids, bounds, turns):
            first, end = run[0][0], run[-1][1]
            out += ids[copied:first]
            documents = [tuple(ids[a:b]) for a, b in run]
            gap = ids[run[0][1] : run[1][0]] if len(run) > 1 else []
            if len(run) > 1:  # each token is hashed once, for any number of lists
                prefix_hash, hashed = hash((prefix_hash, tuple(out[hashed:]))), len(out)
            for place, i in enumerate(self.order(prefix_hash, documents, tenant)):
                out += gap if place else []
                arranged.append((len(out), len(out) + len(documents[i])))
                out += documents[i]
            copied = end
        return [*out, *ids[copied:]], tuple(arranged)

    def order(self, behind: int, documents: Sequence[Document], tenant: str | None) -> list[int]:
        """Return the order of documents after a text with the hash ``behind``, and record it."""
        if len(documents) < 2:
            return list(range(len(documents)))
        history = self.by_tenant.setdefault(tenant, _TenantOrders())
        names = [hash(one) for one in documents]
        left: dict[int, list[int]] = {}
        for i in reversed(range(len(names))):
            left.setdefault(names[i], []).append(i)
        order = [left[name].pop() for name in self._longest(history, behind, documents, names)]
        history.matches += bool(order)
        rest = sorted(
            set(range(len(names))).difference(order), key=lambda i: -history.uses[names[i]]
        )
        order += rest
        self._note(history, (behind, tuple(names[i] for i in order)))
        return order

    def _longest(
        self,
        history: _TenantOrders,
        behind: int,
        documents: Sequence[Document],
        names: Sequence[int],
    ) -> Names:
        """Return the longest prefix, in tokens or characters, of an earlier order that has only documents of the
        prompt.

        Of equal prefixes, an order without other documents is preferred, then the latest.
        """
        tokens, have = dict(zip(names, map(len, documents))), Counter(names)
        best: tuple[int, bool] = 0, False
        longest: Names = ()
        for earlier, order in history.orders:
            if earlier != behind or order[0] not in have:
                continue
            left, count = have.copy(), 0
            while count < len(order) and left[order[count]] > 0:
                left[order[count]] -= 1
                count += 1
            score = sum(tokens[name] for name in order[:count]), count == len(order)
            if score >= best:
                best, longest = score, order[:count]
        return longest

    def _note(self, history: _TenantOrders, key: tuple[int, Names]) -> None:
        if key in history.orders:
            history.orders.move_to_end(key)
            return
        history.orders[key] = None
        history.uses.update(key[1])
        history.size += size_of(key[1])
        self.size += size_of(key[1])
        while history.size > self.most_own or self.size > self.most:
            largest = history if history.size > self.most_own else self._largest()
            self.size -= largest.forget_oldest()
            if not largest.orders:
                self.by_tenant = {name: one for name, one in self.by_tenant.items() if one.orders}

    def _largest(self) -> _TenantOrders:
        """Return the tenant that drops an order when the memory is full.

        It has the most orders per match. Tenants without a match share ``NEW_SHARE``, since a
        client can invent a tenant with a single prompt.
        """
        tenants = self.by_tenant.values()
        new = [history for history in tenants if not history.matches]
        if sum(history.size for history in new) > self.most * NEW_SHARE:
            return max(new, key=lambda history: history.size)
        used = (history for history in tenants if history.matches)
        return max(used, key=lambda history: history.size / history.matches)


def _lists(
    ids: Sequence[int], bounds: Bounds, turns: frozenset[int]
) -> list[list[tuple[int, int]]]:
    """Return the lists of documents of a prompt."""
    lists: list[list[tuple[int, int]]] = [[pair] for pair in bounds[:1]]
    gap: Sequence[int] | None = None
    for (begin, end), pair in pairwise(bounds):
        between = ids[end : pair[0]]
        if (
            len(between) <= MAX_GAP
            and (len(lists[-1]) == 1 or between == gap)
            and turns.isdisjoint(ids[begin : pair[1]])
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
    return any(one not in (None, -1) for one in starts)


def arrange_ids(
    tokenizer: Any, ids: list[int], bounds: fields.Bounds, tenant: str | None
) -> tuple[list[int], list[int]]:
    """Return a prompt's tokens with its documents in the best order, and their flat bounds."""
    if all(isinstance(one, int) for one in ids):
        ids, bounds = orders.arrange(ids, bounds, tenant, _tokens_of_templates(tokenizer))
    return ids, [x for pair in bounds for x in pair]


@functools.lru_cache(maxsize=1)
def _tokens_of_templates(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that chat templates use as separators: special and added tokens."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return frozenset([*getattr(tokenizer, "all_special_ids", ()), *added.values()])
