"""The shadow index: which requests return to which paths, independent of the cache's contents.

Each request has one record: the *tip*, the end of its path. A later request whose path runs through the tip
continues it. That is one reuse sample of the tip's category: the gap between the two arrivals. A tip not
continued yet is a censored sample. A path that branches off an earlier path shares a prefix with it: the
end of that prefix is a *junction*, and every further request through it is a reuse sample of a shared
prefix. Since residency is not used, a policy does not learn from its own evictions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from sglang_canopy.records import Request
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.hint_trust import HintRecord
from sglang_canopy.reuse.tenant_window import TenantWindow


@dataclass(slots=True, eq=False)
class Tip:
    """End of one request's path, or a junction of two paths, and whether it was continued."""

    size: ClassVar[int] = 1
    """A tip is one sample (``tenant_window.py``)."""
    created_at: float
    category: Category
    tenant: str | None = None
    origin: int = 0
    """Last full block of the conversation's first prompt, equal for all its tips."""
    turn: int = 1
    """Requests seen on this path, including this one."""
    own_gap_s: float | None = None
    """Moving average of this conversation's own gaps."""
    added_tokens: int = 0
    """Prompt tokens that were new to its path."""
    history_tokens: int = 0
    """Prompt and output tokens."""
    path_blocks: int = 0
    """Blocks of the path on arrival."""
    indexed_at: tuple[int, ...] = ()
    """Blocks at which it is indexed."""
    is_open: bool = True
    """Whether no request has continued it yet."""
    is_void: bool = False
    """Whether it is no sample of returns: answer cut off, or too many junctions."""
    gap_s: float = 0.0
    growth_tokens: int = -1
    """New tokens of the continuing prompt; -1 if not sampled."""
    last_use: list[float] = field(init=False)
    """Last use, shared by all tips of a conversation (or junction)."""
    first_seen_at: float = field(init=False)
    """Junctions only: time at which the prefix was first seen."""
    sender: Hashable = field(init=False)
    """Sender of the hints (``hint_trust.sender_of``)."""
    return_at: float | None = None
    hinted_s: float = 0.0
    """Hinted return, in seconds after ``created_at``."""
    hinted_over: bool = False
    tenant_record: HintRecord | None = None
    over_record: HintRecord | None = None

    def __post_init__(self) -> None:
        self.last_use, self.first_seen_at = [self.created_at], self.created_at
        self.sender = self.tenant


@dataclass(slots=True, eq=False)
class NewBlocks:
    """Blocks added by a request."""

    created_at: float
    tenant: str | None
    blocks: Sequence[int]
    size: int


def full_blocks(path: Sequence[int], tokens: int, block_tokens: int) -> int:
    """Return the number of blocks of ``path`` that ``tokens`` tokens fill. The partial last block
    is excluded, since the next turn changes it."""
    return min(tokens // block_tokens, len(path)) if tokens > 0 else len(path)


class ShadowIndex:
    """Tips and junctions by chained block hash, in a window bounded in time and in number.
    ``max_samples``: of the window; all of them were observed for the same chance to return, so
    censoring is unbiased. ``max_blocks``: block hashes held. When a bound is reached, the tenant
    with the most entries loses its oldest (``tenant_window.py``)."""

    def __init__(self, window_s: float, max_samples: int, max_blocks: int) -> None:
        self.samples: TenantWindow[Tip] = TenantWindow(window_s, max_samples)
        self._tips: dict[int, Tip] = {}
        self._junctions: dict[int, Tip] = {}
        self._owner_by_block: dict[int, NewBlocks] = {}
        self._new_blocks: TenantWindow[NewBlocks] = TenantWindow(window_s, max_blocks)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def block_count(self) -> int:
        return len(self._owner_by_block)

    def __iter__(self) -> Iterator[Tip]:
        """Iterate over all samples of the window, oldest first."""
        return iter(self.samples)

    def matched_blocks(self, path: Sequence[int]) -> int:
        """Return the number of leading blocks of ``path`` up to the deepest known block."""
        owner_by_block = self._owner_by_block
        for depth in range(len(path), 0, -1):
            if path[depth - 1] in owner_by_block:
                return depth
        return 0

    def pop_open_tip(self, path: Sequence[int], matched_blocks: int) -> Tip | None:
        """Remove and return the deepest open tip among the first ``matched_blocks``."""
        tips = self._tips
        for depth in range(matched_blocks, 0, -1):
            tip = tips.get(path[depth - 1])
            if tip is not None:
                self.close(tip)
                return tip
        return None

    def find_junctions(self, path: Sequence[int]) -> list[int]:
        """Return the block hashes of the junctions on ``path``, shallowest first."""
        junctions = self._junctions
        return list(filter(junctions.__contains__, path)) if junctions else []

    def junction(self, block: int) -> Tip | None:
        return self._junctions.get(block)

    def birth_time(self, block: int, default: float) -> float:
        """Return the time at which ``block`` was first seen, or ``default``."""
        owner = self._owner_by_block.get(block)
        return default if owner is None else owner.created_at

    def add_blocks(self, time: float, tenant: str | None, blocks: Sequence[int]) -> None:
        """Add new blocks, first seen at ``time`` in a request of ``tenant``."""
        if not blocks:
            return
        owner_by_block = self._owner_by_block
        new_blocks = NewBlocks(time, tenant, blocks, len(blocks))
        owner_by_block.update(dict.fromkeys(blocks, new_blocks))
        for expelled in self._new_blocks.add(new_blocks, time):
            for block in expelled.blocks:
                if owner_by_block.get(block) is expelled:
                    del owner_by_block[block]
            expelled.blocks = ()

    def open_tip(self, tip: Tip, block: int) -> None:
        """Index ``tip`` at ``block``, so that a request through the block continues it."""
        earlier_tip = self._tips.get(block)
        if earlier_tip is not None and earlier_tip is not tip:
            self.close(earlier_tip)
        self._tips[block] = tip
        tip.indexed_at = (*tip.indexed_at, block)

    def open_junction(self, tip: Tip, block: int) -> None:
        """Set ``tip`` as the open sample of the junction at ``block``."""
        earlier_tip = self._junctions.get(block)
        if earlier_tip is not None:
            earlier_tip.indexed_at = ()
        self._junctions[block] = tip
        tip.indexed_at = (block,)

    def add_sample(self, tip: Tip, now: float) -> Sequence[Tip]:
        """Add a sample to the window. Return the samples that left it."""
        expelled = self.samples.add(tip, now)
        for expelled_tip in expelled:
            self.close(expelled_tip)
        return expelled

    def tip_created_by(self, request: Request) -> Tip | None:
        """Return the open tip that this request created on arrival."""
        block_count = full_blocks(request.path, request.prompt_tokens, request.block_tokens)
        tip = self._tips.get(request.path[block_count - 1]) if block_count else None
        return tip if tip is not None and tip.created_at == request.time else None

    def close(self, tip: Tip) -> None:
        """Remove a tip or junction from the index; its sample stays in the window."""
        tips, junctions = self._tips, self._junctions
        for block in tip.indexed_at:
            if tips.get(block) is tip:
                del tips[block]
            if junctions and junctions.get(block) is tip:
                del junctions[block]
        tip.indexed_at = ()
