"""Reading reused records of chunks from a cold disk: read-ahead on and off, queues of some depths.

    python benchmark/chunk/cold_disk.py --dir DIR [--tokens 400] [--chunks 4] [--repeats 5]

Files of random KV, dropped from the page cache before every reading (fsync, then fadvise DONTNEED).
Arms take turns. ``kernel``: as the kernel reads a mapped file; ``none``: its read-ahead off and
nothing asked for; ``0``, ``1``, ``4``, ...: read-ahead off and so many further layers asked for
ahead; ``shipped``: whichever of ``kernel`` and ``4`` the share that is wanted makes it.
Every record is checked against its checksum, as in a server. MiB are what left the disk
(``read_bytes`` of the process), beside what was wanted.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from pathlib import Path

import torch

from canopy_chunks.store import disk, read_ahead
from canopy_chunks.store.chunk import Chunk

SHAPES = {
    "SmolLM2-135M, fp32": (30, 3, 64, torch.float32),
    "8B Llama, bf16": (32, 8, 128, torch.bfloat16),
}
"""Layers, KV heads, head dimension, type."""
SHIPPED, AHEAD = disk.SCATTERED, read_ahead.LAYERS_AHEAD


def left_the_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("read_bytes"))


def write(folder: Path, count: int, tokens: int, shape: tuple) -> list[Path]:
    layers, heads, dim, dtype = shape
    paths = []
    for i in range(count):
        k, v = (torch.randn(layers, tokens, heads, dim).to(dtype) for _ in range(2))
        paths.append(folder / f"cold-{i}.chunk")
        disk.write(paths[-1], Chunk(tuple(range(tokens)), k, v))
    return paths


def cold(path: Path) -> disk.DiskChunk:
    found = disk.open_chunk(path)
    with path.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return found


def read(paths: list[Path], arm: str, reused: float, seed: int) -> tuple[float, float, float]:
    """Return seconds, MiB read from disk and MiB requested for one prompt's chunks."""
    make = torch.Generator().manual_seed(seed)
    chunks = [cold(path) for path in paths]
    parts = []
    for chunk in chunks:
        assert chunk.mapped is not None
        if arm == "none":
            chunk.mapped.madvise(mmap.MADV_RANDOM)
        if arm in ("kernel", "none"):
            chunk.mapped = None  # no read-ahead; records still hold the mapping
        kept = torch.rand(len(chunk), generator=make) < reused
        parts.append((chunk, kept.nonzero()[:, 0]))
    disk.SCATTERED = SHIPPED if arm == "shipped" else 2.0
    read_ahead.LAYERS_AHEAD = int(arm) if arm.isdigit() else AHEAD
    before, start = left_the_disk(), time.perf_counter()
    for _ in read_ahead.read_layers_ahead(parts, chunks[0].layers):
        pass
    took = time.perf_counter() - start
    wanted = sum(chunk.bytes_read for chunk in chunks)
    return took, (left_the_disk() - before) / 2**20, wanted / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", default="kernel,none,0,1,4,16,shipped")
    parser.add_argument("--reused", default="0.85,0.25,0.05")
    args = parser.parse_args()
    arms = args.arms.split(",")
    for name, shape in SHAPES.items():
        paths = write(args.dir, args.chunks, args.tokens, shape)
        for reused in map(float, args.reused.split(",")):
            found: dict[str, list[tuple[float, float, float]]] = {arm: [] for arm in arms}
            for i in range(args.repeats):
                for arm in arms[i % len(arms) :] + arms[: i % len(arms)]:
                    found[arm].append(read(paths, arm, reused, i))
            print(f"{name}: {args.chunks} x {args.tokens} tokens, {100 * reused:.0f} % reused")
            for arm in arms:
                took, came, wanted = (statistics.median(x) for x in zip(*found[arm]))
                spread = sorted(x for x, *_ in found[arm])
                print(
                    f"  {arm:>6}: {1000 * took:7.1f} ms ({1000 * spread[0]:.1f} to "
                    f"{1000 * spread[-1]:.1f}), {came:6.1f} MiB from the disk, {wanted:.1f} wanted"
                )
        for path in paths:
            path.unlink()


if __name__ == "__main__":
    main()
