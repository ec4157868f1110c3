"""The quality check in a server: the queue of prompts to check, and the check in progress.

A check runs in pieces, in idle time and within a budget before batches, in the encoder's memory. When
the encoder needs that memory, the check stops, releases it, and restarts later, until it has used
the pieces of ``MAX_WORK_CHECKS`` whole checks. A prompt's tokens are kept until its check ends, for at
most ``MAX_WAIT_S``.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.cache import dense_cache
from canopy_documents.fuse.fusion import fused_steps
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.selectors import make_selector
from canopy_documents.quality.answers import greedy_steps
from canopy_documents.quality.tenant_limits import (
    MAX_TENANTS,
    RAISED,
    STOPPED,
    TIE_NATS,
    QualityLimits,
    raised_ratio,
)
from canopy_documents.store.chunk import FusedPrompt, PlacedChunk
from canopy_documents.store.device_copy import to_device
from sglang_canopy.tenant import shown_tenant

ANSWER_TOKENS = 16


def max_pieces(prompt_tokens: int, piece_tokens: int) -> int:
    """Return the maximum number of pieces of a check of a prompt."""
    return 2 * -(-prompt_tokens // piece_tokens) + 3 + 2 * (ANSWER_TOKENS - 1)


class NoLongerStored(Exception):
    """A prompt's documents were removed from the store during its check."""


@torch.no_grad()
def answers_differ(
    model: Model,
    ids: Sequence[int],
    find_placed: Callable[[], tuple[PlacedChunk, ...]],
    selector: str,
    ratio: float,
    end: int | None,
    stop: row_forward.Stop,
) -> Generator[None, None, bool]:
    """Return whether the first ``ANSWER_TOKENS`` greedy tokens, up to ``end``, differ beyond a near
    tie.

    Computes in a separate cache of one prompt. Yields between pieces, and may be abandoned there. A
    piece of a prefill that ``stop`` ends is repeated. Ranks of a split model take the same steps.
    Raises NoLongerStored if ``find_placed`` returns no documents by then.
    """
    n = len(ids)
    tokens = to_device(torch.tensor(ids, dtype=torch.long), model.device)
    cache = dense_cache(model, n + ANSWER_TOKENS)
    piece_size = row_forward.piece_tokens(model.device)
    for piece_start in range(0, n, piece_size):
        piece = tokens[piece_start : piece_start + piece_size]
        piece_end = piece_start + piece.numel()
        positions = torch.arange(piece_start, piece_end, device=model.device)
        seen = cache.truncated(piece_end)
        hidden = yield from row_forward.attempt_until_done(model, piece, positions, seen, stop)
    step_logits = [model.logits(hidden[-1:])[0]]
    first_tokens = [int(step_logits[0].argmax())]
    full = yield from greedy_steps(model, cache, n, first_tokens, ANSWER_TOKENS, end, step_logits)
    yield
    placed = find_placed()  # as late as possible: batches may have run in between
    if not placed:
        raise NoLongerStored
    prompt = FusedPrompt(tokens, placed)
    chooser = make_selector(selector)
    prompt_cache = cache.truncated(n)
    fused = yield from fused_steps(model, prompt, prompt_cache, chooser, ratio, piece_size, stop)
    first_token = [int(fused.logits.argmax())]
    reused = yield from greedy_steps(model, cache, n, first_token, ANSWER_TOKENS, end)
    return differ(full, reused, step_logits)


def differ(full: Sequence[int], reused: Sequence[int], step_logits: Sequence[torch.Tensor]) -> bool:
    """Return whether two answers differ beyond a near tie; step_logits: the logits of ``full``."""
    for full_token, reused_token, logits in zip(full, reused, step_logits):
        if full_token != reused_token:
            return float(logits[full_token] - logits[reused_token]) > TIE_NATS
    return False


logger = logging.getLogger(__name__)

MAX_CHECKS = 16
MAX_WORK_CHECKS = 4
LOAD_SHARE = 0.02
"""Share of computed prompt tokens that checks may compute under load."""
MAX_WAIT_S = 600.0


@dataclass(slots=True, eq=False)
class WaitingCheck:
    """A prompt waiting for a quality check.

    quality_level: the tenant's quality level; ratio: the recompute ratio it would be served with; pieces: pieces
    of the check that were started.
    """

    ids: Sequence[int]
    request: Any
    quality_level: int
    ratio: float
    pieces: int = 0


class QualityChecker:
    """Checks of one scheduler process.

    end: the token that ends an answer, if known. piece_tokens: tokens in a piece of a check.

    Every rank of a split model offers the same prompts and takes the same steps. Requests have the
    fields of ``server.request.DocumentRequest``; the library is ``server.library.Library``.
    """

    def __init__(self, limits: QualityLimits, end: int | None, piece_tokens: int) -> None:
        self.limits, self.end, self.piece_tokens = limits, end, piece_tokens
        self.waiting: deque[WaitingCheck] = deque()
        self.dropped: Counter[str] = Counter()
        self.budget_tokens = 0.0
        self._reuse_versions: dict[str | None, int] = {}
        self._base_version = self._last_version = 0
        self._running_check: Generator[None, None, bool] | None = None

    @property
    def busy(self) -> bool:
        """Whether a check waits or is in progress."""
        return bool(self.waiting)

    def reuse_version(self, tenant: str | None) -> int:
        """Return a number that changes when the tenant's reuse is stopped, so that KV kept before
        is not used again."""
        return self._reuse_versions.get(tenant, self._base_version)

    def offer(self, ids: Sequence[int], request: Any, ratio: float) -> None:
        """Queue a prompt for a check if the tenant limits select it. ``ratio``: served with it."""
        level = self.limits.select_check_level(request.tenant)
        if level is None:
            return
        has_waiting = any(check.request.tenant == request.tenant for check in self.waiting)
        if has_waiting or (len(self.waiting) == MAX_CHECKS and not self._displace(request.tenant)):
            self.dropped["too many wait"] += 1
        else:
            self.waiting.append(WaitingCheck(tuple(ids), request, level, ratio))

    def _displace(self, tenant: str | None) -> bool:
        """Drop the waiting check of the lowest-ranked tenant, if ``tenant`` ranks higher.

        A suspect's check is never dropped. Returns whether a check was dropped.
        """
        current = self.waiting[0] if self._running_check is not None else None
        droppable = [check for check in self.waiting if check is not current]
        lowest = min(droppable, key=lambda check: self.limits.queue_priority(check.request.tenant))
        priority = self.limits.queue_priority(lowest.request.tenant)
        if priority[0] or priority >= self.limits.queue_priority(tenant):
            return False
        self.waiting.remove(lowest)
        self.dropped["displaced"] += 1
        return True

    def interrupt(self, now: float) -> None:
        """Stop the check in progress, as the encoder needs its memory. It restarts later or is dropped."""
        if self._running_check is not None:
            self._running_check = None
            check = self.waiting.popleft()
            if check.pieces < MAX_WORK_CHECKS * max_pieces(len(check.ids), self.piece_tokens):
                self.waiting.append(check)
            else:
                self.dropped["interrupted"] += 1
        self._drop_old(now)

    def forget(self, tenant: str | None) -> None:
        """Drop a tenant's prompts, as its documents are deleted."""
        if self.waiting and self.waiting[0].request.tenant == tenant:
            self._running_check = None
        self.waiting = deque(check for check in self.waiting if check.request.tenant != tenant)

    def run_within_budget(self, library: Any, now: float, tokens: int) -> None:
        """Run pieces before a batch of ``tokens``: one, or as many as its share allows.

        A check continues after the batch, in the encoder's share of the memory, unless the encoder
        needs it.
        """
        self._drop_old(now)
        pieces = 0
        max_count = max(1, int(LOAD_SHARE * tokens) // self.piece_tokens)
        while self.waiting and self.budget_tokens >= self.piece_tokens and pieces < max_count:
            self.run_piece(library, now)
            self.budget_tokens -= self.piece_tokens
            pieces += 1

    def add_budget(self, tokens: int) -> None:
        """Allow later checks to compute a share of a batch's computed ``tokens``."""
        if self.waiting:
            self.budget_tokens += LOAD_SHARE * tokens
        else:
            self.budget_tokens = 0.0

    def run_piece(self, library: Any, now: float) -> None:
        """Run one piece of the check in progress, or start the next check."""
        if self._running_check is None:
            self._drop_old(now)
        if not self.waiting:
            return
        check = self.waiting[0]
        try:
            if self._running_check is None:
                self._running_check = self._start_check(library, check)
            if self._running_check is not None:
                check.pieces += 1
                next(self._running_check)
                return
        except StopIteration as end:
            self._record_result(library, check, end.value)
        except NoLongerStored:
            self.dropped["no longer stored"] += 1
        except Exception:
            logger.exception("canopy: a prompt's answers cannot be compared; the check is skipped")
            self.dropped["failed"] += 1
        self._running_check = None
        self.waiting.popleft()

    def stats(self) -> dict[str, Any]:
        """Return the counts of checks. Safe on any thread."""
        return {**self.limits.stats(), "waiting": len(self.waiting), "dropped": dict(self.dropped)}

    def _drop_old(self, now: float) -> None:
        """Drop prompts that have waited too long, except the prompt being checked."""
        waiting = list(self.waiting)[int(self._running_check is not None) :]
        for check in [check for check in waiting if now - check.request.time_s > MAX_WAIT_S]:
            self.waiting.remove(check)
            self.dropped["too old"] += 1

    def _start_check(self, library: Any, check: WaitingCheck) -> Generator[None, None, bool] | None:
        request = check.request

        def find_placed() -> tuple[Any, ...]:
            return library.find_placed(request, check.ids)  # type: ignore[no-any-return]

        if not find_placed():
            self.dropped["no longer stored"] += 1
            return None
        ratio = raised_ratio(check.ratio) if check.quality_level == RAISED else check.ratio
        selector = library.options.selector
        return answers_differ(
            library.model, check.ids, find_placed, selector, ratio, self.end, library.stop
        )

    def _record_result(self, library: Any, check: WaitingCheck, differs: bool) -> None:
        """Count a check. While reuse is stopped, delete a differing prompt's documents, so that they
        are encoded again.

        The stored KV may be at fault.
        """
        tenant = check.request.tenant
        level = self.limits.record_check(tenant, check.quality_level, differs)
        if level is not None:
            logger.warning(
                "canopy: reuse of documents of tenant %s is now %s, as answers with it differ from "
                "full recompute %s",
                shown_tenant(tenant), level, "too often" if differs else "seldom again",
            )  # fmt: skip
        if level is not None and self.limits.quality_level(tenant) == STOPPED:
            self._change_version(tenant)
        if differs and self.limits.quality_level(tenant) == STOPPED:
            library.forget(check.request)

    def _change_version(self, tenant: str | None) -> None:
        self._last_version += 1
        self._reuse_versions.pop(tenant, None)
        self._reuse_versions[tenant] = self._last_version
        if len(self._reuse_versions) > MAX_TENANTS:  # unlisted tenants get a new one, too
            del self._reuse_versions[next(iter(self._reuse_versions))]
            self._base_version = self._last_version
