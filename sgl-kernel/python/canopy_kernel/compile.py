"""Compile every shipped specialisation ahead of time, without a GPU, and say what each one needs.

    python -m canopy_kernel.compile [--json FILE]

Fails on a register spill or on more shared memory than the chip gives a block. This catches what
does not compile for a chip; what is wrong, the interpreter's tests catch; what is slow, only a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ARCHES = (80, 90)
SHARED_BYTES = {80: 166_912, 90: 232_448}
"""The most shared memory one block may take (CUDA programming guide, compute capabilities)."""
DIMS = (64, 128, 256)
PAGES = (1, 16, 64)
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Built:
    """One compiled kernel: registers a thread, bytes of spills and of shared memory."""

    kernel: str
    arch: int
    config: str
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        return self.spill_bytes == 0 and self.shared_bytes <= SHARED_BYTES[self.arch]


def specialisations() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], int, int]]:
    """(name, kernel, signature, constants, warps, stages) of everything that ships."""
    import torch

    from canopy_kernel import attention, correct, fuse, lowpass, rope_scatter

    for kind, name in DTYPES.items():
        for dim in DIMS:
            for page in PAGES:
                dtype = getattr(torch, name)
                block_q, block_k, warps, stages = attention.blocks(dim, dtype)
                label = f"d{dim} {kind} page{page}"
                yield (
                    f"sparse_prefill {label}",
                    attention._sparse_prefill_kernel,
                    {
                        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{kind}"),
                        "positions_ptr": "*i64",
                        "query_starts_ptr": "*i32",
                        "slots_ptr": "*i64",
                        "key_starts_ptr": "*i32",
                        "scale_log2": "fp32",
                    },
                    {
                        "GROUP": 4,
                        "PAGE": page,
                        "DIM": dim,
                        "BLOCK_Q": block_q,
                        "BLOCK_K": block_k,
                        "IEEE": kind == "fp32",
                        "WIDE": False,
                    },
                    warps,
                    stages,
                )
                pointers = {"positions_ptr": "*i64", "slots_ptr": "*i64", "table_ptr": "*fp32"}
                yield (
                    f"rope_scatter {label}",
                    rope_scatter._rope_scatter_kernel,
                    {
                        **dict.fromkeys(
                            ("raw_k_ptr", "v_ptr", "k_pool_ptr", "v_pool_ptr"), f"*{kind}"
                        ),
                        "source_ptr": "*i64",
                        **pointers,
                    },
                    {"PAGE": page, "DIM": dim, "BLOCK": rope_scatter.BLOCK},
                    4,
                    2,
                )
                yield (
                    f"fuse {label}",
                    fuse._fuse_kernel,
                    {
                        **dict.fromkeys(
                            ("fresh_k_ptr", "fresh_v_ptr", "raw_k_ptr", "raw_v_ptr"), f"*{kind}"
                        ),
                        **dict.fromkeys(("k_pool_ptr", "v_pool_ptr"), f"*{kind}"),
                        "origin_ptr": "*i64",
                        **pointers,
                    },
                    {"PAGE": page, "DIM": dim, "BLOCK": fuse.BLOCK},
                    4,
                    2,
                )
                yield (
                    f"correct {label}",
                    correct._correct_kernel,
                    {
                        **dict.fromkeys(("delta_k_ptr", "delta_v_ptr", "weight_ptr"), "*fp32"),
                        **dict.fromkeys(("limit_k_ptr", "limit_v_ptr"), "*fp32"),
                        **dict.fromkeys(("k_pool_ptr", "v_pool_ptr"), f"*{kind}"),
                        "index_ptr": "*i64",
                        **pointers,
                    },
                    {"WIDTH": 16, "PAGE": page, "DIM": dim, "BLOCK": correct.BLOCK},
                    4,
                    2,
                )
        yield (
            f"energy {kind}",
            lowpass._energy_kernel,
            {"k_ptr": f"*{kind}", "v_ptr": f"*{kind}", "out_ptr": "*fp32"},
            {"WIDTH": 1024, "BLOCK": lowpass.BLOCK, "STEP": lowpass.STEP},
            4,
            2,
        )


def build(arches: tuple[int, ...] = ARCHES, match: str = "", exact: bool = False) -> list[Built]:
    """Compile what ``match`` is part of the name of (``exact``: the end of it).

    Raises RuntimeError under the interpreter, where kernels cannot be compiled.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels cannot be compiled; unset it")
    found = []
    for name, kernel, pointers, constants, warps, stages in specialisations():
        if not (name.endswith(match) if exact else match in name):
            continue
        signature = {
            a: "constexpr" if a in constants else pointers.get(a, "i32") for a in kernel.arg_names
        }
        attributes = {
            (i,): [["tt.divisibility", 16]]
            for i, a in enumerate(kernel.arg_names)
            if signature[a].startswith("*") or a.endswith(("_row", "_page", "_token", "_head"))
        }
        for arch in arches:
            source = ASTSource(kernel, signature, constants, attributes)
            options = {"num_warps": warps, "num_stages": stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
            registers, spills = _resources(compiled.asm["ptx"], arch)
            shared = compiled.metadata.shared
            found.append(Built(name.split()[0], arch, name, registers, spills, shared))
    return found


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Registers and spill bytes, from ptxas itself."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        chip = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        done = subprocess.run(
            [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={chip}", str(file), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        )
    said = done.stderr + done.stdout
    registers = int(re.search(r"Used (\d+) registers", said).group(1))
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return registers, int(spills.group(1)) + int(spills.group(2))


def main() -> int:
    """Compile everything, print a table, return 1 if anything does not fit."""
    parser = argparse.ArgumentParser(prog="canopy_kernel.compile", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--match", default="", help="only kernels whose name contains this")
    parser.add_argument("--exact", action="store_true", help="only names that end with --match")
    args = parser.parse_args()
    found = build(match=args.match, exact=args.exact)
    for b in found:
        flag = "" if b.fits else "  DOES NOT FIT"
        print(
            f"sm_{b.arch}  {b.config:<32} {b.registers:>4} registers  {b.spill_bytes:>5} B spilled"
            f"  {b.shared_bytes:>7} B shared{flag}"
        )
    bad = [b for b in found if not b.fits]
    print(f"{len(found)} compiled, {len(bad)} do not fit")
    if args.json:
        args.json.write_text(json.dumps([{**asdict(b), "fits": b.fits} for b in found], indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
