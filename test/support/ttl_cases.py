"""Small traces of paths, and a slow computation of the hits under TTLs."""

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from canopy_lab.group_ttl.paths import Paths, paths_of
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.ttl.table import TTLTable

BLOCK_TOKENS = 16


class PathUse(NamedTuple):
    time_s: float
    path: tuple[int, ...]
    category: str


def paths_from_uses(uses: Sequence, block_tokens: int = BLOCK_TOKENS, cut_tokens: int = 0) -> Paths:
    """Return the paths of (time, path, category); ``cut_tokens`` tokens are missing from each last block."""
    trace = [
        TraceRequest(time_s, block_tokens * len(path) - cut_tokens, 0, path, block_tokens, category)
        for time_s, path, category in uses
    ]
    return paths_of(trace, lambda request: request.category)


@st.composite
def requests(draw: st.DrawFn, max_requests: int = 14) -> list[PathUse]:
    """Requests whose block ids are chained: an id stands for its whole path."""
    block_ids: dict[tuple[int, ...], int] = {}
    time_s, uses = 0.0, []
    for _ in range(draw(st.integers(1, max_requests))):
        time_s += draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0]))
        steps = draw(st.lists(st.integers(0, 2), min_size=0, max_size=5))
        paths = [tuple(steps[: i + 1]) for i in range(len(steps))]
        path = tuple(block_ids.setdefault(path, len(block_ids) + 1) for path in paths)
        uses.append(PathUse(time_s, path, draw(st.sampled_from(["chat", "api"]))))
    return uses


def slow_replay(uses: list, tables: list[tuple[float, TTLTable]]) -> tuple[int, int, float]:
    """Return (prompt tokens, hit tokens, mean tokens on the disk). ``tables``: (start in seconds, table) in order."""
    expiry_s: dict[int, float] = {}
    counted_until_s: dict[int, float] = {}
    prompt_tokens = hit_tokens = 0
    stored_token_s = 0.0
    end_s = uses[-1].time_s
    for time_s, path, category in uses:
        table = [other for start, other in tables if start <= time_s or other is tables[0][1]][-1]
        groups = table.groups_along(path)
        prompt_tokens += BLOCK_TOKENS * len(path)
        for depth, block in enumerate(path):
            ttl_s = max(table.ttl_s(group, category) for group in groups[depth:])
            is_stored = block in expiry_s and time_s <= expiry_s[block]
            if block in expiry_s:
                until_s = min(expiry_s[block], time_s)
                stored_token_s += BLOCK_TOKENS * max(until_s - counted_until_s[block], 0.0)
            hit_tokens += BLOCK_TOKENS * is_stored
            expiry_s[block] = max(expiry_s[block] if is_stored else 0.0, time_s + ttl_s)
            counted_until_s[block] = time_s
    for block, expires_s in expiry_s.items():
        stored_token_s += BLOCK_TOKENS * max(min(expires_s, end_s) - counted_until_s[block], 0.0)
    return prompt_tokens, hit_tokens, stored_token_s / end_s if end_s else 0.0
