"""TTLs from the traffic of a recent window, while a server runs or over a trace.

The thread that serves requests only pays for ``observe`` and, every few minutes, ``snapshot``;
``WindowSnapshot.table`` is for another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from canopy_lab.group_ttl.learn import Learning, Learnt, learn
from canopy_lab.group_ttl.path_log import OTHER, PathLog, PathSnapshot
from sglang_canopy.ttl.table import SERVER_HASH, TTLTable


@dataclass(frozen=True, slots=True)
class WindowSnapshot:
    """What a window held at one moment; nothing changes it."""

    log: PathSnapshot
    hash: str
    learning: Learning

    def table(self, budget_bytes: float, bytes_per_token: float) -> TTLTable:
        """The table that is expected to win most hits with ``budget_bytes`` on the disk, on
        average, of ``bytes_per_token`` each. Takes seconds. Deterministic."""
        return self.learn(budget_bytes, bytes_per_token).table

    def learn(self, budget_bytes: float, bytes_per_token: float) -> Learnt:
        """The same with what it was chosen by."""
        return learn(self.log, budget_bytes / bytes_per_token, self.learning, self.hash)


class TrafficWindow:
    """The last ``window_s`` seconds of requests, in bounded memory (see ``PathLog``).

    ``learning`` says how tables are made; by default one is made every ``window_s``.
    """

    def __init__(
        self,
        *,
        window_s: float = 3600.0,
        block_tokens: int = 64,
        learning: Learning | None = None,
        hash: str = SERVER_HASH,
        max_requests: int = 1 << 17,
        max_blocks: int = 1 << 20,
    ) -> None:
        self.hash = hash
        self.log = PathLog(
            block_tokens=block_tokens,
            window_s=window_s,
            max_requests=max_requests,
            max_blocks=max_blocks,
        )
        self.learning = learning or Learning(refresh_s=window_s)

    def observe(
        self,
        path: Sequence[int],
        time_s: float,
        tokens: int | None = None,
        category: str = OTHER,
    ) -> None:
        """A request of ``path`` (ids, shallowest first), ``tokens`` long, came at ``time_s``."""
        self.log.observe(path, time_s, tokens, category)

    def snapshot(self) -> WindowSnapshot:
        """What was seen, to be worked on in another thread."""
        return WindowSnapshot(self.log.snapshot(), self.hash, self.learning)

    def table(self, budget_bytes: float, bytes_per_token: float) -> TTLTable:
        """``snapshot().table``, where one thread does both."""
        return self.snapshot().table(budget_bytes, bytes_per_token)
