"""What the scheduler remembers of one request's chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_canopy.chunk.chunk import Chunk, Placed
from sglang_canopy.chunk.disk import DiskChunk
from sglang_canopy.chunk.server.part import Part


@dataclass(slots=True)
class Known:
    """A chunk of a prompt: where it is, its address, and its KV if the store has it."""

    start: int
    end: int
    key: str
    tier: str | None = None
    chunk: Chunk | DiskChunk | Part | None = None

    def placed(self, floor: int) -> Placed | None:
        """The stored part that begins at ``floor`` or later; None if nothing of it is left."""
        if self.chunk is None or self.end <= floor:
            return None
        skip = max(0, floor - self.start)
        part = Part(self.chunk, skip) if skip else self.chunk  # type: ignore[arg-type]
        return Placed(part, self.start + skip)  # type: ignore[arg-type]


@dataclass(slots=True)
class Plan:
    """Which tokens of one prompt are computed, and whose KV the others get.

    computed: ``[n]`` bool; placed: chunks with KV, from the exact prefix on; prefix: tokens that
    came from the exact tree.
    """

    computed: torch.Tensor
    placed: tuple[Placed, ...]
    prefix: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Wish:
    """On ``req.canopy_chunks``: what the request asked for and what became of it.

    keys, alone: each chunk's address behind ``prefix``, and with nothing of the prompt before it;
    salt: of the addresses, what SGLang keeps KV apart by; tenant: whose documents these are;
    why: the reason for running normally, or None; fused: reused KV has been in this request's
    slots (never unset); exact: tokens before the first that was ever reused; head: these, once they
    are computed and may enter the exact tree (0: not yet); limit: how much of it was let into the
    tree; chosen ``[n]`` bool: the first plan's choice, kept so that a retraction does not change the answer; report: what
    the response tells; told: the prompt was completed once, and the report was handed over.
    """

    bounds: tuple[tuple[int, int], ...]
    keys: tuple[str, ...]
    alone: tuple[str, ...]
    prefix: tuple[int, ...]
    salt: str
    tenant: str | None
    ratio: float
    selector: str
    time_s: float
    said_ratio: bool = False
    checked: bool = False
    why: str | None = None
    fused: bool = False
    head: int = 0
    limit: int = 0
    exact: int | None = None
    plan: Plan | None = None
    chosen: torch.Tensor | None = None
    told: bool = False
    report: dict[str, Any] = field(default_factory=dict)


def wish_of(req: Any) -> Wish | None:
    """The wish of a request, or ``None``."""
    return getattr(req, "canopy_chunks", None)


def custom_params(req: Any) -> Mapping[str, Any]:
    """A request's ``custom_params`` as a mapping, empty where it has none."""
    found = getattr(getattr(req, "sampling_params", None), "custom_params", None)
    return found if isinstance(found, Mapping) else {}
