"""Host memory of documents: pinned bytes against requested bytes, and the kernel's read speed."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence

import torch
import triton
from result import result

from canopy_chunks.fuse.transfer import MAX_PROGRAMS
from canopy_chunks.store.host_memory import HostMemory
from canopy_chunks.store.shape import Shape
from canopy_kernel.rope_scatter import LayersScatter

SHAPE = Shape(2, 32, 8, 128, 4096, 49152, 1e-5)
TOKENS = (2000, 16000)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    return argparse.ArgumentParser(description=__doc__).parse_args(words)


def memory_of_process() -> int:
    """Bytes that this process holds in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main() -> None:
    arguments()
    size = (3 << 29) + 4096
    torch.zeros(1, device="cuda")
    before = memory_of_process()
    memory = HostMemory(SHAPE, torch.bfloat16, size, pin=True)
    result(
        "pinned",
        asked_mib=size >> 20,
        held_mib=(memory_of_process() - before) >> 20,
        is_pinned=memory.k.is_pinned() and memory.v.is_pinned(),
    )
    pools = [torch.zeros(20000, 1, 8, 128, device="cuda").bfloat16() for _ in range(2)]
    turns = torch.randn(20000, 128, device="cuda")
    for count in TOKENS:
        source = torch.randperm(20000, device="cuda")[:count].sort()[0]
        at = torch.arange(count, device="cuda")
        for where, most, rows in (
            ("pinned", MAX_PROGRAMS, (memory.k[:1], memory.v[:1])),
            ("pinned", None, (memory.k[:1], memory.v[:1])),
            ("device", None, (memory.k[:1].cuda(), memory.v[:1].cuda())),
        ):
            keys, values, k_pool, v_pool = ([x] for x in (*rows, *pools))
            about = ([count], source, at, at, turns, k_pool, v_pool, most)
            work = functools.partial(LayersScatter(keys, values, *about).launch, 0, 1)
            ms = triton.testing.do_bench(work, warmup=20, rep=80, return_mode="median")
            moved = 2 * count * 8 * 128 * 2
            named = {"rows_in": where, "most_programs": most, "tokens": count}
            result("rope_scatter", **named, ms=ms, gb_s=moved / ms / 1e6)


if __name__ == "__main__":
    main()
