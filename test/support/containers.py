"""Number of entries of each container in Canopy's objects, by path."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_CONTAINERS = (dict, list, set, frozenset, tuple, deque)


def count_entries(*roots: Any) -> dict[str, int]:
    """Count the entries of every container that is reachable from ``roots`` through Canopy's objects.

    Keys are ``Class.attribute``, and ``[]`` for a container in a container; containers at one path
    are summed. Tuples cannot grow: they are followed, not counted."""
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
            class_name = type(value).__name__
            stack += [(f"{class_name}.{name}", item) for name, item in _attributes(value)]
    return entry_counts


def grown_containers(
    server: Any, serve: Callable[[int], None], first_count: int, last_count: int,
    max_growth: float, slack_entries: int,
) -> dict[str, tuple[int, int]]:  # fmt: skip
    """Return each container of ``server`` that grows, with its entries after ``first_count`` and ``last_count``
    requests. Allowed growth: ``max_growth``, a fraction of the first entries, plus ``slack_entries``."""
    before: dict[str, int] = {}
    for request_number in range(last_count):
        serve(request_number)
        if request_number == first_count:
            before = server.count_entries()
    return {
        path: (before.get(path, 0), count)
        for path, count in server.count_entries().items()
        if count > (1.0 + max_growth) * before.get(path, 0) + slack_entries
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
