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
from sglang_canopy.chunk import disk, engine
from sglang_canopy.chunk.cache import KVCache, dense_cache
from sglang_canopy.chunk.chunk import FusedPrompt, Placed
from sglang_canopy.chunk.encode import Encoder
from sglang_canopy.chunk.ratio import CostProfile
from sglang_canopy.chunk.rope import rotate_into
from sglang_canopy.chunk.selectors import Context, make_selector

SELECTOR = "frequency"
QUESTION = 40
"""Tokens outside chunks."""


@dataclass(frozen=True)
class Pool:
    """Where chunks lie. seconds_per_token: what its link takes a token, all layers together."""

    name: str
    folder: Path | None = None
    seconds_per_token: float = 0.0

    def hold(self, prompt: FusedPrompt) -> FusedPrompt:
        """The prompt with its chunks in this pool, none of their pages in memory."""
        if self.folder is None:
            return prompt
        placed = []
        for i, p in enumerate(prompt.placed):
            path = self.folder / f"{i}-{len(p.chunk)}.chunk"
            if not path.exists():
                disk.write(path, p.chunk)
            gc.collect()  # a page that is still mapped is not dropped
            drop(path)
            placed.append(Placed(disk.open_chunk(path), p.start))  # type: ignore[arg-type]
        return replace(prompt, placed=tuple(placed))


def drop(path: Path) -> None:
    """Write a file's pages out and drop them from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def device_bytes() -> int:
    """Bytes that this process has made the storage device read."""
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
                turned = torch.empty_like(k)
                rotate_into(k, model.rope.table(at), turned)
                cache.write(layer, at, turned, v)

        hidden, _ = engine.run_rows(model, prompt.ids[rows], rows, cache, arrive=arrive)
        logits = engine.logits(model, hidden[-1:])[0]
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


def ttft(prompts: Sequence[FusedPrompt], pool: Pool, ratio: float, repeats: int = 3) -> float:
    """Equation 12: the mean over prompts; of each the median of ``repeats``."""
    found = []
    for prompt in prompts:
        cache = dense_cache(loaded()[0], len(prompt))
        found.append(
            statistics.median(overlapped(prompt, pool, ratio, cache)[0] for _ in range(repeats))
        )
    return statistics.mean(found)


def profile(prompt: FusedPrompt, pool: Pool, repeats: int = 2) -> CostProfile:
    """t_c, t_i and t_o of a pool, each over all layers, measured apart: a full prefill; reading all
    chunks without computing; the prefill of what is in no chunk, the KV being in place."""
    model, _ = loaded()
    cache, inside = dense_cache(model, len(prompt)), prompt.in_chunk()
    outside = (~inside).nonzero()[:, 0]
    compute, transfer, other = [], [], []
    for _ in range(repeats):
        held = pool.hold(prompt)
        start = time.perf_counter()
        with ThreadPoolExecutor(1) as thread:
            for layer, parts in enumerate(_read(held, pool, inside, thread)):
                for at, k, v in parts:
                    turned = torch.empty_like(k)
                    rotate_into(k, model.rope.table(at), turned)
                    cache.write(layer, at, turned, v)
        read = time.perf_counter()
        engine.logits(model, engine.run_rows(model, prompt.ids[outside], outside, cache)[0][-1:])
        asked = time.perf_counter()
        engine.logits(model, engine.prefill(model, prompt.ids, cache)[-1:])
        compute.append((time.perf_counter() - asked) / len(prompt))
        transfer.append((read - start) / prompt.reusable)
        other.append(asked - read)
    return CostProfile(*(statistics.median(x) for x in (compute, transfer, other)))
