"""Few rows from position 0 by decomposition: a block that no key precedes, through FlashInfer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from result import result

from canopy_kernel import attention, decomposition, stock_kernels
from canopy_kernel.ragged import Rows


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    return argparse.ArgumentParser(description=__doc__).parse_args(words)


def main() -> None:
    arguments()
    capability = 10 * torch.cuda.get_device_capability()[0]
    types = (torch.bfloat16, torch.bfloat16)
    choice = stock_kernels.choose("flashinfer", None, 128, *types, "cuda", capability)
    if choice.paged is None:
        result("empty block", left_out=choice.reason)
        return
    random = lambda *size: torch.randn(*size, device="cuda").bfloat16()  # noqa: E731
    rows = Rows.one((torch.arange(60) * 5).cuda(), torch.randperm(300, device="cuda"))
    q, k, v = random(60, 32, 128), random(300, 1, 8, 128), random(300, 1, 8, 128)
    got = decomposition.decomposed(q, k, v, rows, 128**-0.5, choice.paged)
    torch.cuda.synchronize()
    want = attention.reference(q, k, v, rows, 128**-0.5)
    result("empty block", error=float((got.float() - want.float()).norm() / want.float().norm()))


if __name__ == "__main__":
    main()
