"""The TTLs of a tier, by group; a group is the subtree below one prefix.

Kareto, section 4.3 (arXiv 2603.08739): the most reused prefix subtrees are groups with TTLs of their
own; all other paths form the residual group. A page belongs to the deepest listed root on its path.

A page gets the first TTL that is defined:

1. the request's own (``own_ttl_s``);
2. its group's, if a listed root is on its path;
3. its category's, if the table lists the category;
4. the residual group's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from sglang_canopy.errors import CanopyError

RESIDUAL = -1
"""The group of every path without a listed root."""

SERVER_HASH = "xxh3-chained"
"""Roots are a server's ids of token blocks (``radix/live_request.py``), which include salts."""
TRACE_HASH = "trace"
"""Roots are block ids of a trace, unknown to servers."""
HASHES = (SERVER_HASH, TRACE_HASH)

MAX_GROUPS = 4096
MAX_CATEGORIES = 1024
MAX_NAME_CHARS = 128

_TABLE_KEYS = ("groups", "residual_ttl_s", "block_tokens", "hash", "categories")
_GROUP_KEYS = ("root", "ttl_s", "name")


@dataclass(frozen=True, slots=True)
class Group:
    """One prefix subtree."""

    root: int
    """Id of the subtree's first block, which belongs to the group."""
    ttl_s: float
    """Seconds from the last use; ``inf`` never expires, 0 is not stored."""
    name: str = ""
    """Display name."""


@dataclass(frozen=True, slots=True)
class TTLTable:
    """The TTLs of one tier. Immutable, so threads may share it. Raises ``CanopyError`` for a value out
    of range or a root listed twice."""

    groups: tuple[Group, ...] = ()
    """Prefix subtrees with a TTL of their own."""
    residual_ttl_s: float = math.inf
    """TTL of all other paths."""
    block_tokens: int = 64
    """Tokens per block."""
    hash: str = SERVER_HASH
    """Origin of the block ids; servers refuse ``trace``."""
    categories: Mapping[str, float] = field(default_factory=dict)
    """Category -> TTL in seconds, for paths without a listed root."""
    _group_by_root: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.hash in HASHES, "hash", self.hash, f"one of {', '.join(HASHES)}")
        tokens = self.block_tokens
        is_whole = type(tokens) is int and 1 <= tokens <= 65536
        _check(is_whole, "block_tokens", tokens, "a whole number from 1 to 65536")
        _check_count("groups", self.groups, MAX_GROUPS)
        _check_count("categories", self.categories, MAX_CATEGORIES)
        _check_ttl("residual_ttl_s", self.residual_ttl_s)
        for name, ttl_s in self.categories.items():
            _check_name("category", name, can_be_empty=False)
            _check_ttl(f"category {name!r}", ttl_s)
        group_by_root: dict[int, int] = {}
        for i, group in enumerate(self.groups):
            is_whole = type(group.root) is int and 0 <= group.root < 1 << 64
            _check(is_whole, f"group {i}: root", group.root, "a whole number of 64 bits")
            _check_ttl(f"group {i}: ttl_s", group.ttl_s)
            _check_name(f"group {i}: name", group.name, can_be_empty=True)
            if group.root in group_by_root:
                raise CanopyError(
                    f"TTL table: groups {group_by_root[group.root]} and {i} have the same root "
                    f"{group.root:#x}; list it once"
                )
            group_by_root[group.root] = i
        object.__setattr__(self, "_group_by_root", group_by_root)

    def group_of(self, path: Sequence[int]) -> int:
        """Return the index of the deepest listed root on ``path`` (ids, shallowest first)."""
        get = self._group_by_root.get
        if self._group_by_root:
            for block in reversed(path):
                group = get(block)
                if group is not None:
                    return group
        return RESIDUAL

    def groups_along(self, path: Sequence[int]) -> list[int]:
        """Return the group of each block of ``path``."""
        get, group, groups = self._group_by_root.get, RESIDUAL, []
        for block in path:
            group = get(block, group)
            groups.append(group)
        return groups

    def ttl_s(
        self, group: int, category: str | None = None, own_ttl_s: float | None = None
    ) -> float:
        """Return the seconds for which a page of ``group`` stays after its last use. A refined
        ``category`` (``api|end|turn1``) also matches its coarser names (``api|end``, ``api``).
        ``own_ttl_s`` is the request's own TTL. An unknown group counts as residual."""
        if own_ttl_s is not None:
            return own_ttl_s
        if 0 <= group < len(self.groups):
            return self.groups[group].ttl_s
        if category is not None and self.categories:
            while True:
                category_ttl_s = self.categories.get(category)
                if category_ttl_s is not None:
                    return category_ttl_s
                category, refined, _ = category.rpartition("|")
                if not refined:
                    break
        return self.residual_ttl_s

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; ``null`` is "no expiry", roots are hexadecimal (64 bits)."""
        return {
            "groups": [
                {"root": hex(group.root), "ttl_s": _finite_or_none(group.ttl_s), "name": group.name}
                for group in self.groups
            ],
            "residual_ttl_s": _finite_or_none(self.residual_ttl_s),
            "block_tokens": self.block_tokens,
            "hash": self.hash,
            "categories": {name: _finite_or_none(ttl_s) for name, ttl_s in self.categories.items()},
        }

    @classmethod
    def from_json(cls, table: Any) -> TTLTable:
        """Parse the JSON object of ``to_json``. Raises ``CanopyError``."""
        _check_keys("TTL table", table, _TABLE_KEYS)
        groups = table.get("groups", [])
        _check(isinstance(groups, list), "groups", groups, "a list")
        _check_count("groups", groups, MAX_GROUPS)
        categories = table.get("categories", {})
        is_object = isinstance(categories, Mapping)
        _check(is_object, "categories", categories, 'an object like {"api": 3600}')
        return cls(
            groups=tuple(_parse_group(i, group) for i, group in enumerate(groups)),
            residual_ttl_s=_parse_ttl("residual_ttl_s", table.get("residual_ttl_s")),
            block_tokens=table.get("block_tokens", 64),
            hash=table.get("hash", SERVER_HASH),
            categories={
                name: _parse_ttl(f"category {name!r}", ttl_s) for name, ttl_s in categories.items()
            },
        )


def _parse_group(number: int, group: Any) -> Group:
    _check_keys(f"TTL table: group {number}", group, _GROUP_KEYS)
    for key in ("root", "ttl_s"):
        if key not in group:
            raise CanopyError(f"TTL table: group {number} has no {key!r}; it needs root and ttl_s")
    root = group["root"]
    if isinstance(root, str):
        try:
            root = int(root, 16)
        except ValueError:
            raise CanopyError(
                f"TTL table: group {number}: root must be hexadecimal like '0x1f', got {root!r:.60}"
            ) from None
    return Group(root, _parse_ttl(f"group {number}: ttl_s", group["ttl_s"]), group.get("name", ""))


def _check_keys(subject: str, entry: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(entry, Mapping):
        raise CanopyError(f"{subject} must be a JSON object, got {entry!r:.60}")
    for key in entry:
        if key not in allowed:
            raise CanopyError(
                f"{subject}: unknown key {key!r:.60}; allowed keys: {', '.join(allowed)}"
            )


def _parse_ttl(key: str, value: Any) -> float:
    if value is None:
        return math.inf
    _check_ttl(key, value)
    return float(value)


def _check(is_valid: bool, key: str, value: Any, allowed: str) -> None:
    if not is_valid:
        raise CanopyError(f"TTL table: {key} must be {allowed}, got {value!r:.60}")


def _check_count(key: str, entries: Sized, max_count: int) -> None:
    _check(len(entries) <= max_count, f"number of {key}", len(entries), f"at most {max_count}")


def _check_ttl(key: str, value: Any) -> None:
    is_valid = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    _check(is_valid, key, value, "seconds, 0 or more (null in JSON: no expiry)")


def _check_name(key: str, value: Any, *, can_be_empty: bool) -> None:
    least_chars = 0 if can_be_empty else 1
    is_valid = isinstance(value, str) and least_chars <= len(value) <= MAX_NAME_CHARS
    _check(is_valid, key, value, f"a string of {least_chars} to {MAX_NAME_CHARS} characters")


def _finite_or_none(ttl_s: float) -> float | None:
    return None if math.isinf(ttl_s) else ttl_s
