"""The forward pass of sparse rows at their true positions, over the KV in the cache.

The KV of all other tokens is read from the cache. With all rows it is a plain prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import torch

from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.model import ForwardEnd, Model

Result = TypeVar("Result")

Watch = Callable[[int, torch.Tensor, torch.Tensor], "torch.Tensor | None"]
"""``(layer, q [m, heads, d] rotated, positions [m])``, called after this layer's K and V are
written.

Returns the rows' attention ``[m, heads, d]`` if it has computed it, else None.
"""


def piece_tokens(device: torch.device) -> int:
    """Return the number of tokens in a piece of background work, the longest wait of a batch.

    A GPU computes 256 tokens in little more time than 64, since it reads the weights once for both:
    on an H100 in bf16 the arithmetic takes longer than the reads from about 300 tokens on.
    """
    return 64 if device.type == "cpu" else 256


def finish(steps: Generator[None, None, Result]) -> Result:
    """Run ``steps`` to the end and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


@dataclass(slots=True)
class RowsAttention:
    """A :class:`~.model.Attention` that writes the rows' K and V into ``cache``, then attends by
    position.

    The forward ends after ``last_layer``, the last watched layer.
    """

    cache: KVCache
    positions: torch.Tensor
    scale: float
    watch: Watch | None = None
    on_layer: Callable[[int], None] | None = None
    last_layer: int | None = None

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of one layer's rows."""
        if self.on_layer is not None:  # this layer's reused KV is in place after the call
            self.on_layer(layer)
        self.cache.write(layer, self.positions, k, v)
        attended = self.watch(layer, q, self.positions) if self.watch is not None else None
        if layer == self.last_layer:
            raise ForwardEnd
        if attended is None:
            attended = self.cache.attend(layer, q, self.positions, self.scale)
        return attended


@torch.no_grad()
def run_rows(
    model: Model,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: KVCache,
    watch: Watch | None = None,
    on_layer: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Run rows ``ids [m]`` at sorted ``positions [m]`` through all layers.

    Returns the rows' hidden states ``[m, hidden]`` after the last norm.
    """
    scale = model.shape.head_dim**-0.5
    return model.forward(ids, positions, RowsAttention(cache, positions, scale, watch, on_layer))


@torch.no_grad()
def probe_rows(
    model: Model,
    ids: torch.Tensor,
    positions: torch.Tensor,
    cache: KVCache,
    last_layer: int,
    watch: Watch | None = None,
) -> None:
    """Run rows as :func:`run_rows`, but only up to the attention of layer ``last_layer``."""
    scale = model.shape.head_dim**-0.5
    try:
        model.forward(
            ids, positions, RowsAttention(cache, positions, scale, watch, last_layer=last_layer)
        )
    except ForwardEnd:
        return


MAX_STOPS = 4
"""Maximum consecutive stops of background work: under any traffic some of it is done."""
MIN_RUN_ROWS = 8
UNDISTURBED_RUNS = 16
"""Undisturbed runs after which a run has more rows again."""


def always_false() -> bool:
    """Return False: the ``has_request_come`` of work that no request ends early."""
    return False


@dataclass(slots=True)
class Stop:
    """Ends a run of background work before a layer, if ``has_request_come``.

    The run is repeated later. Each stop halves the rows of the next runs, so that runs fit between
    the messages of a monitor and their rows are kept.
    """

    has_request_come: Callable[[], bool] = always_false
    stops_in_a_row: int = 0
    halvings: int = 0
    undisturbed_runs: int = 0

    def __call__(self, layer: int) -> None:
        if self.stops_in_a_row < MAX_STOPS and self.has_request_come():
            self.stops_in_a_row += 1
            self.halvings += 1
            self.undisturbed_runs = 0
            raise ForwardEnd

    def limit_rows(self, rows: int) -> int:
        """Return the rows of the next run, of at most ``rows``."""
        return min(rows, max(MIN_RUN_ROWS, rows >> self.halvings))

    def record_completion(self) -> None:
        """Record a run that was not ended."""
        self.stops_in_a_row, self.undisturbed_runs = 0, self.undisturbed_runs + 1
        if self.undisturbed_runs >= UNDISTURBED_RUNS:
            self.halvings, self.undisturbed_runs = max(0, self.halvings - 1), 0


def attempt(
    model: Model, ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, stop: Stop
) -> torch.Tensor | None:
    """Run rows as :func:`run_rows` and return their hidden states; None if ``stop`` ended the run,
    which is then to be repeated."""
    try:
        hidden = run_rows(model, ids, positions, cache, on_layer=stop)
    except ForwardEnd:
        return None
    stop.record_completion()
    return hidden


def attempt_until_done(
    model: Model, ids: torch.Tensor, positions: torch.Tensor, cache: KVCache, stop: Stop
) -> Generator[None, None, torch.Tensor]:
    """Return :func:`attempt` of a later step if ``stop`` ends the first; yields after each."""
    while (hidden := attempt(model, ids, positions, cache, stop)) is None:
        yield
    yield
    return hidden


def prefill(model: Model, ids: torch.Tensor, cache: KVCache, start: int = 0) -> torch.Tensor:
    """Plain prefill of ``ids [m]`` from position ``start``. Returns the last hidden states."""
    positions = torch.arange(start, start + ids.numel(), device=ids.device)
    return run_rows(model, ids, positions, cache)
