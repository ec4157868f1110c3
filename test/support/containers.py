"""Number of entries of each container in Canopy's objects, by path."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_CONTAINERS = (dict, list, set, frozenset, tuple, deque)


def count_entries(*roots: Any) -> dict[str, int]:
    """Entries of every container that can grow (tuples are followed only), reachable from ``roots``
    through objects of Canopy's classes, by ``Class.attribute``; containers at the same path are
    summed, and ``[]`` stands for a container in a container."""
    entry_counts: dict[str, int] = {}
    visited: set[int] = set()
    stack: list[tuple[str, Any]] = [(type(root).__name__, root) for root in roots]
    while stack:
        path, value = stack.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, _CONTAINERS):
            if not isinstance(value, tuple):
                entry_counts[path] = entry_counts.get(path, 0) + len(value)
            items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
            stack += [(f"{path}[]", item) for item in items if _is_followed(item)]
        if _is_ours(value):
            name = type(value).__name__
            stack += [(f"{name}.{key}", item) for key, item in _attributes(value)]
    return entry_counts


def grown_containers(
    server: Any, serve: Callable[[int], None], first: int, last: int, share: float, slack: int
) -> dict[str, tuple[int, int]]:
    """Return the containers of ``server`` that have more entries after ``last`` requests than after ``first``.

    ``share`` and ``slack``: growth that is allowed, as a part of the entries and in entries.
    """
    before: dict[str, int] = {}
    for number in range(last):
        serve(number)
        if number == first:
            before = server.count_entries()
    return {
        path: (before.get(path, 0), count)
        for path, count in server.count_entries().items()
        if count > (1.0 + share) * before.get(path, 0) + slack
    }


def _is_followed(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or _is_ours(value)


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(("sglang_canopy", "canopy_documents", "canopy_lab"))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    names = list(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    for name in names:
        item = getattr(value, name, None)
        if _is_followed(item):
            yield name, item
