"""Requests over a live tree, in the steps of SGLang's scheduler, to count their misses."""

from __future__ import annotations

from typing import Any

from support.live_tree import LiveTree, fake_req


class TreeRequest:
    """One request: created on arrival; ``admit``, then ``end``."""

    def __init__(
        self, tree: LiveTree, tokens: list[int], time: float, category: str = "default", **keys: Any
    ) -> None:
        self.tree, self.tokens = tree, tokens
        self.req = fake_req(tokens, [], {"time": time, "category": category}, **keys)
        self.salt, self.extra_key = self.req.cache_salt, self.req.extra_key
        self.request = tree.core.requests.register(self.req)

    def admit(self, unloaded_host_tokens: int = 0) -> TreeRequest:
        """Look up all tokens except the last, as SGLang does, and admit the request."""
        hit_tokens = self.tree.match(self.tokens[:-1], self.salt, self.extra_key)
        self.req.prefix_len = self.req.cached_tokens = self.req.cached_tokens_device = hit_tokens
        self.req.host_hit_length, self.req.host_loaded_length = unloaded_host_tokens, 0
        self.tree.core.requests.admit(self.req)
        return self

    def end(self, output_tokens: int = 0) -> TreeRequest:
        """Insert the KV of the prompt and then of ``output_tokens`` generated tokens."""
        self.tree.insert(self.tokens, self.request, self.salt, self.extra_key)
        self.req.output_ids = [-1 - i for i in range(output_tokens)]
        self.tree.core.requests.report_end(self.req)
        self.tree.insert(self.tokens + self.req.output_ids, self.request, self.salt, self.extra_key)
        return self

    def abort(self) -> None:
        """End the request without inserting its KV."""
        self.tree.core.requests.report_end(self.req)


def missed_tokens(tree: LiveTree) -> int:
    """Missed prompt tokens as the categories' rows count them."""
    return sum(row.missed_tokens for row in tree.core.live.counters.all_counts())


def tokens_by_cause(tree: LiveTree) -> dict[tuple[str, str], int]:
    """Missed tokens by cause and tier; they sum to ``missed_tokens``."""
    tokens = {key: n for key, n in tree.core.missed.tokens.items() if n}
    assert sum(tokens.values()) == missed_tokens(tree), (tokens, missed_tokens(tree))
    return tokens
