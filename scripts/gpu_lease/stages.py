"""The attention kernel with other pipeline stages and programs a multiprocessor than ship."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import torch
import triton
from result import result

from canopy_kernel import attention, triton_attention
from canopy_kernel.ragged import Rows

PROMPTS = ((4096, 0.15), (16384, 0.15), (32768, 0.05))
"""Tokens, and the share of them that is computed."""
STAGES, PROGRAMS = (3, 4, 5), (1, 2)
shipped = triton_attention.configuration


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    return argparse.ArgumentParser(description=__doc__).parse_args(words)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").bfloat16()


def time_of(tokens: int, computed: torch.Tensor) -> float:
    """Milliseconds of one 8B-shaped layer."""
    k, v, q = random(tokens, 1, 8, 128), random(tokens, 1, 8, 128), random(len(computed), 32, 128)
    rows = Rows.one(computed.cuda(), torch.randperm(tokens, device="cuda"))
    work = lambda: attention.sparse_prefill_triton(q, k, v, rows, 128**-0.5)  # noqa: E731
    return triton.testing.do_bench(work, warmup=20, rep=80, return_mode="median")


def main() -> None:
    arguments()
    for tokens, share in PROMPTS:
        computed = torch.randperm(tokens)[: int(tokens * share)].sort()[0]
        flop = 4.0 * 32 * 128 * float((computed + 1).sum())
        triton_attention.configuration = shipped
        times = {"shipped": time_of(tokens, computed)}
        for stages in STAGES:
            for programs in PROGRAMS:
                other = {"stages": stages, "programs": programs}
                triton_attention.configuration = lambda *a, other=other, **more: (
                    dataclasses.replace(shipped(*a, **more), **other)
                )
                try:
                    times[f"{stages} stages, {programs}"] = time_of(tokens, computed)
                except Exception as error:  # more shared memory than there is
                    times[f"{stages} stages, {programs}"] = type(error).__name__
        tflop_s = {n: flop / ms / 1e9 for n, ms in times.items() if isinstance(ms, float)}
        result("stages", tokens=tokens, computed=len(computed), ms=times, tflop_s=tflop_s)


if __name__ == "__main__":
    main()
