"""Cache pools of several speeds, and a prefill that reads one layer while it computes another.

``memory``; ``cold disk``: files whose pages are dropped from the page cache before every prefill;
``slow``: files behind a link of a given bandwidth, which a thread sleeps out.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cachetune.measure import loaded
from canopy_chunks.calibration.search import CostProfile
from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import KVCache, dense_cache
from canopy_chunks.fuse.encode import Encoder
from canopy_chunks.fuse.rope import rotate
from canopy_chunks.fuse.selectors import Context, make_selector
from canopy_chunks.store import disk
from canopy_chunks.store.chunk import FusedPrompt, Placed

SELECTOR = "frequency"
QUESTION = 40
"""Tokens outside chunks."""


@dataclass(frozen=True)
class Pool:
    """Storage of chunks. seconds_per_token: link time per token over all layers."""

    name: str
    folder: Path | None = None
    seconds_per_token: float = 0.0

    def hold(self, prompt: FusedPrompt) -> FusedPrompt:
        """Return the prompt with its chunks in this pool, with none of their pages in memory."""
        if self.folder is None:
            return prompt
        placed = []
        for i, p in enumerate(prompt.placed):
            path = self.folder / f"{i}-{len(p.chunk)}.chunk"
            if not path.exists():
                disk.write(path, p.chunk)
            gc.collect()  # the page cache does not drop mapped pages
            drop(path)
            placed.append(Placed(disk.open_chunk(path), p.start))  # type: ignore[arg-type]
        return replace(prompt, placed=tuple(placed))


def drop(path: Path) -> None:
    """Flush a file's pages and drop them from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def device_bytes() -> int:
    """Return the bytes that this process has read from the storage device."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("read_bytes"):
            return int(line.split()[1])
    return 0


def made_up(chunk_tokens: int, chunks: int, seed: int = 0) -> FusedPrompt:
    """A prompt of random tokens: chunks of a size, encoded alone, and a question behind them."""
    model, _ = loaded()
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(100, 40_000, (chunk_tokens * chunks + QUESTION,), generator=draw)
    encoder = Encoder(model)
    starts = range(0, chunk_tokens * chunks, chunk_tokens)
    placed = [Placed(encoder.encode(ids[at : at + chunk_tokens].tolist()), at) for at in starts]
    for p in placed:
        make_selector(SELECTOR).scores(p.chunk)  # type: ignore[attr-defined]
    return FusedPrompt(ids, tuple(placed))


@torch.no_grad()
def overlapped(
    prompt: FusedPrompt, pool: Pool, ratio: float, cache: KVCache
) -> tuple[float, torch.Tensor]:
    """Seconds and logits ``[vocab]`` of one prefill in which a thread reads the next layer's reused KV
    from the pool.

    At ratio 1 nothing is reused.
    """
    model, _ = loaded()
    held = pool.hold(prompt)
    start = time.perf_counter()
    inside = prompt.in_chunk()
    inside[len(prompt) - 1] = False
    reused = torch.zeros_like(inside)
    if ratio < 1:
        reused = inside.clone()
        reused[make_selector(SELECTOR).choose(Context(model, prompt, cache, ratio)).tokens] = False
    rows = (~reused).nonzero()[:, 0]
    with ThreadPoolExecutor(1) as thread:
        reads = _read(held, pool, reused, thread)

        def arrive(layer: int) -> None:
            for at, k, v in next(reads):
                cache.write(layer, at, rotate(k, model.rope.table(at)), v)

        hidden, _ = engine.run_rows(model, prompt.ids[rows], rows, cache, arrive=arrive)
        logits = model.logits(hidden[-1:])[0]
    return time.perf_counter() - start, logits


_Layer = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _read(
    prompt: FusedPrompt, pool: Pool, reused: torch.Tensor, thread: ThreadPoolExecutor
) -> Iterator[_Layer]:
    """One layer's positions, K before RoPE and V a chunk; the next is read in the meantime."""
    layers = loaded()[0].shape.layers
    wanted = [(p, reused[p.start : p.end].nonzero()[:, 0]) for p in prompt.placed]
    wanted = [(p, inside) for p, inside in wanted if inside.numel()]
    tokens = sum(inside.numel() for _, inside in wanted)

    def layer_rows(layer: int) -> _Layer:
        due = time.perf_counter() + tokens * pool.seconds_per_token / layers
        found = [(inside + p.start, *p.chunk.rows(layer, inside)) for p, inside in wanted]
        time.sleep(max(0.0, due - time.perf_counter()))
        return found

    coming = thread.submit(layer_rows, 0)
    for layer in range(layers):
        ready = coming.result()
        if layer + 1 < layers:
            coming = thread.submit(layer_rows, layer + 1)
        yield ready


@torch.no_grad()
def clocked(prompt: FusedPrompt, pool: Pool, ratio: float, cache: KVCache) -> float:
    """The seconds of the same prefill on a machine of its own: the CPU seconds of each layer's reading
    and of each layer's computing, and the link's time, put together as equation 9's pipeline does.

    What other processes take of this machine does not count, so that small differences show. From a
    real disk, reading is the time that passes.
    """
    model, _ = loaded()
    layers, held = model.shape.layers, pool.hold(prompt)
    reused = prompt.in_chunk()
    reused[len(prompt) - 1] = False
    if ratio < 1:
        chosen = make_selector(SELECTOR).choose(Context(model, prompt, cache, ratio)).tokens
        reused[chosen] = False
    else:
        reused[:] = False
    wanted = [(p, reused[p.start : p.end].nonzero()[:, 0]) for p in held.placed]
    rows, link = (~reused).nonzero()[:, 0], int(reused.sum()) * pool.seconds_per_token / layers
    on_disk = pool.folder is not None and not pool.seconds_per_token
    read, spent, begun = [], [], []

    def arrive(layer: int) -> None:
        start, cpu = time.perf_counter(), time.thread_time()
        found = [(inside + p.start, *p.chunk.rows(layer, inside)) for p, inside in wanted]
        spent.append(time.thread_time() - cpu)
        read.append(time.perf_counter() - start if on_disk else spent[-1] + link)
        begun.append(time.thread_time())
        for at, k, v in found:
            cache.write(layer, at, rotate(k, model.rope.table(at)), v)

    start = time.thread_time()
    hidden, _ = engine.run_rows(model, prompt.ids[rows], rows, cache, arrive=arrive)
    model.logits(hidden[-1:])
    ends = [*(at - own for at, own in zip(begun[1:], spent[1:])), time.thread_time()]
    compute = [end - begin for begin, end in zip(begun, ends)]
    return begun[0] - spent[0] - start + in_pipeline(read, compute)


def in_pipeline(read: Sequence[float], compute: Sequence[float]) -> float:
    """Return the end of the last layer. Reads are sequential; a layer is computed once it is read and
    the previous layer is computed."""
    there = done = 0.0
    for reading, computing in zip(read, compute):
        there += reading
        done = max(there, done) + computing
    return done


def ttft(
    prompts: Sequence[FusedPrompt], pool: Pool, ratio: float, repeats: int = 3, clock: bool = False
) -> float:
    """Equation 12: the mean over prompts; of each the median of ``repeats``. ``clock``: by
    :func:`clocked`, else as it happens on this machine."""
    found = []
    for prompt in prompts:
        cache = dense_cache(loaded()[0], len(prompt))
        found.append(
            statistics.median(
                clocked(prompt, pool, ratio, cache)
                if clock
                else overlapped(prompt, pool, ratio, cache)[0]
                for _ in range(repeats)
            )
        )
    return statistics.mean(found)


def profile(prompt: FusedPrompt, pool: Pool, repeats: int = 2, clock: bool = False) -> CostProfile:
    """t_c, t_i and t_o of a pool, each over all layers, measured apart: a full prefill; reading all
    chunks without computing; the prefill of what is in no chunk, the KV being in place.

    ``clock``: CPU seconds and the link's time, else as it happens.
    """
    model, _ = loaded()
    now = time.thread_time if clock else time.perf_counter
    on_disk = pool.folder is not None and not pool.seconds_per_token
    cache, inside = dense_cache(model, len(prompt)), prompt.in_chunk()
    outside = (~inside).nonzero()[:, 0]
    compute, transfer, other = [], [], []
    for _ in range(repeats):
        held = pool.hold(prompt)
        start = time.perf_counter() if on_disk else now()
        if clock:
            for layer in range(model.shape.layers):
                for p in held.placed:
                    p.chunk.rows(layer, torch.arange(len(p.chunk)))
        else:
            with ThreadPoolExecutor(1) as thread:
                for _parts in _read(held, pool, inside, thread):
                    pass
        transfer.append(
            ((time.perf_counter() if on_disk else now()) - start) / prompt.reusable
            + clock * pool.seconds_per_token
        )
        read = now()
        model.logits(engine.run_rows(model, prompt.ids[outside], outside, cache)[0][-1:])
        asked = now()
        model.logits(engine.prefill(model, prompt.ids, cache)[-1:])
        compute.append((now() - asked) / len(prompt))
        other.append(asked - read)
    return CostProfile(*(statistics.median(x) for x in (compute, transfer, other)))
