"""Small traces of paths, and a slow computation of the hits that TTLs give on them."""

from hypothesis import strategies as st

from canopy_lab.group_ttl.paths import Paths, paths_of
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.ttl.table import TTLTable

BLOCK = 16
Request = tuple[float, tuple[int, ...], str]


def log_of(requests: list[Request], block_tokens: int = BLOCK, short: int = 0) -> Paths:
    """Paths of requests of whole blocks, less ``short`` tokens."""
    rows = [
        TraceRequest(time_s, block_tokens * len(path) - short, 0, path, block_tokens, category)
        for time_s, path, category in requests
    ]
    return paths_of(rows, lambda row: row.category)


@st.composite
def requests(draw: st.DrawFn, most: int = 14) -> list[Request]:
    """Requests whose block ids are chained: an id stands for its whole path."""
    ids: dict[tuple[int, ...], int] = {}
    time_s, drawn = 0.0, []
    for _ in range(draw(st.integers(1, most))):
        time_s += draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0]))
        words = draw(st.lists(st.integers(0, 2), min_size=0, max_size=5))
        path = tuple(ids.setdefault(tuple(words[: i + 1]), len(ids) + 1) for i in range(len(words)))
        drawn.append((time_s, path, draw(st.sampled_from(["chat", "api"]))))
    return drawn


def slow_replay(log: list[Request], tables: list[tuple[float, TTLTable]]) -> tuple[int, int, float]:
    """(tokens, hits, mean tokens on the disk), block by block."""
    expiry: dict[int, float] = {}
    since: dict[int, float] = {}
    tokens = hits = 0
    token_s = 0.0
    end = log[-1][0]
    for time_s, path, category in log:
        table = [t for start, t in tables if start <= time_s or t is tables[0][1]][-1]
        groups = table.groups_along(path)
        tokens += BLOCK * len(path)
        for depth, block in enumerate(path):
            ttl_s = max(table.ttl_s(g, category) for g in groups[depth:])
            is_stored = block in expiry and time_s <= expiry[block]
            if block in expiry:
                token_s += BLOCK * max(min(expiry[block], time_s) - since[block], 0.0)
            hits += BLOCK * is_stored
            expiry[block] = max(expiry[block] if is_stored else 0.0, time_s + ttl_s)
            since[block] = time_s
    for block, expires in expiry.items():
        token_s += BLOCK * max(min(expires, end) - since[block], 0.0)
    return tokens, hits, token_s / end if end else 0.0
