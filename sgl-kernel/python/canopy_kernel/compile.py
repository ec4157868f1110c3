"""Compile every shipped specialisation ahead of time, without a GPU, and say what each one needs.

    python -m canopy_kernel.compile [--json FILE] [--match TEXT] [--arch 90]

Fails on a register spill, on more shared memory than the chip gives a block, and on matrix
instructions that repeat work (two groups of warps computing the same scores). This catches what
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

from canopy_kernel.specialisations import Specialisation, specialisations

ARCHES = (80, 90, 100)
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""The most shared memory one block may take (CUDA programming guide, compute capabilities)."""
RESERVED_BYTES = 1024
"""Shared memory that the system takes of each block besides; a multiprocessor has the most of one
block and this."""
REGISTERS = 65_536
WARPS = 64
"""A multiprocessor's, on all three chips. Registers are handed out to a warp in units of 256."""


@dataclass(frozen=True, slots=True)
class Built:
    """One compiled kernel: registers a thread, bytes of spills and of shared memory.

    dots: of each matrix product "MxNxK", the warps along rows and columns of its result; empty
    where the product lives in tensor memory (sm_100) or needs no matrix unit. matrix_work: FLOPs
    of the machine's matrix instructions over those of the products, 1 where none is repeated;
    None where there are none to count. programs: how many a multiprocessor holds at once. waits: of
    each loop the ``async_wait`` inside it, the loads that may still be under way when it goes on: 0
    waits for every load (empty where it has none).
    """

    kernel: str
    arch: int
    config: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    dots: tuple[tuple[str, tuple[int, int]], ...]
    matrix_work: float | None
    programs: int = 1
    waits: tuple[tuple[int, ...], ...] = ()

    @property
    def fits(self) -> bool:
        return (
            self.spill_bytes == 0
            and self.shared_bytes <= SHARED_BYTES[self.arch]
            and self.matrix_work in (None, 1.0)
        )


def chosen(
    arches: tuple[int, ...], matches: tuple[str, ...], exact: bool, kernel: str = ""
) -> Iterator[tuple[int, Specialisation]]:
    """Of each chip the specialisations with one of ``matches`` in the name (``exact``: at its end) of
    kernels that begin with ``kernel``."""
    for arch in arches:
        for s in specialisations(arch):
            named = s.name.endswith(matches) if exact else any(m in s.name for m in matches)
            if named and s.name.startswith(kernel):
                yield arch, s


def compiled(s: Specialisation, arch: int) -> Built:
    """One specialisation for one chip. Raises RuntimeError under the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels cannot be compiled; unset it")
    names = s.kernel.arg_names
    signature = {a: "constexpr" if a in s.constants else s.pointers.get(a, "i32") for a in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, a in enumerate(names)
        if signature[a].startswith("*") or a.endswith(("_row", "_page", "_token", "_head"))
    }
    made = triton.compile(
        ASTSource(s.kernel, signature, s.constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": s.warps, "num_stages": s.stages},
    )
    registers, spills = _resources(made.asm["ptx"], arch)
    layouts, work = products(made.asm["ttgir"])
    done = matrix_flops(made.asm["ptx"], s.warps)
    return Built(
        s.name.split()[0],
        arch,
        s.name,
        registers,
        spills,
        made.metadata.shared,
        layouts,
        done / work if done and work else None,
        programs(registers, s.warps, made.metadata.shared, arch),
        loop_waits(made.asm["ttgir"]),
    )


def programs(registers: int, warps: int, shared_bytes: int, arch: int) -> int:
    """How many programs of a compiled kernel one multiprocessor holds at once."""
    a_warp = -(-registers * 32 // 256) * 256
    shared = (SHARED_BYTES[arch] + RESERVED_BYTES) // (shared_bytes + RESERVED_BYTES)
    return min(REGISTERS // (a_warp * warps), WARPS // warps, shared)


def loop_waits(ttgir: str) -> tuple[tuple[int, ...], ...]:
    """The ``async_wait`` of each loop's body, in the order of the text."""
    found: list[list[int]] = []
    ends: list[str] = []
    for line in ttgir.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        if " scf.for " in line:
            found.append([])
            ends.append(indent + "}")
        elif ends and line.startswith(ends[-1]):
            ends.pop()
        elif ends and (wait := re.search(r"async_wait.*num = (\d+)", line)):
            found[-1].append(int(wait.group(1)))
    return tuple(map(tuple, found))


_DOT = re.compile(
    r"(?:warp_group_dot|tt\.dot) .* : .*?<(\d+)x(\d+)x\w+, .*? \* .*?<(\d+)x(\d+)x\w+, .*"
    r" -> tensor<\d+x\d+xf32, #(\w+)>"
)
_MMA = re.compile(r"^#(\w+) = #ttg\.nvidia_mma<.*warpsPerCTA = \[(\d+), (\d+)\]", re.MULTILINE)


def products(ttgir: str) -> tuple[tuple[tuple[str, tuple[int, int]], ...], float]:
    """Of each matrix product its shape and its warps, and the FLOPs of all of them."""
    warps = {name: (int(a), int(b)) for name, a, b in _MMA.findall(ttgir)}
    found, work = [], 0.0
    for m, k, _, n, layout in _DOT.findall(ttgir):
        if layout in warps:
            found.append((f"{m}x{n}x{k}", warps[layout]))
            work += 2.0 * int(m) * int(n) * int(k)
    return tuple(found), work


def matrix_flops(ptx: str, warps: int) -> float:
    """FLOPs of one pass over every matrix instruction of a program of ``warps`` warps.

    ``wgmma`` belongs to four warps, ``mma.sync`` to one; every one of them runs it.
    """
    total = 0.0
    for kind, m, n, k in re.findall(
        r"^\s+(wgmma\.mma_async|mma)\.sync.*?m(\d+)n(\d+)k(\d+)", ptx, re.M
    ):
        groups = warps // 4 if kind.startswith("wgmma") else warps
        total += 2.0 * int(m) * int(n) * int(k) * groups
    return total


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Registers and spill bytes, from ptxas itself."""
    from triton import knobs

    assembler = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        chip = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        done = subprocess.run(
            [assembler.path, "-v", f"--gpu-name={chip}", str(file), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        )
    output = done.stderr + done.stdout
    registers = int(re.search(r"Used (\d+) registers", output).group(1))
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    return registers, int(spills.group(1)) + int(spills.group(2))


def like(major: int, minor: int) -> int:
    """Of :data:`ARCHES` the one whose kernels a chip of this compute capability runs."""
    return max((arch for arch in ARCHES if arch <= 10 * major + minor), default=ARCHES[0])


def main() -> int:
    """Compile everything, print a table, return 1 if anything does not fit."""
    parser = argparse.ArgumentParser(prog="canopy_kernel.compile", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--match", action="append", help="only kernels whose name contains this")
    parser.add_argument("--exact", action="store_true", help="only names that end with --match")
    parser.add_argument("--kernel", default="", help="only kernels whose name begins with this")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHES, help="only this chip")
    parser.add_argument("--here", action="store_true", help="only the chip of this machine")
    args = parser.parse_args()
    if args.here:
        import torch

        args.arch = [like(*torch.cuda.get_device_capability())]
    found = []
    matches = tuple(args.match or ("",))
    for arch, s in chosen(tuple(args.arch or ARCHES), matches, args.exact, args.kernel):
        b = compiled(s, arch)
        found.append(b)
        warps = sorted({f"{r}x{c}" for _, (r, c) in b.dots})
        layout = f"  warps {','.join(warps)}" if warps else ""
        work = f"  matrix work {b.matrix_work:.2f}" if b.matrix_work else ""
        work += f"  {b.programs} a multiprocessor"
        if any(b.waits):
            work += f"  waits {' '.join(str(min(w)) for w in b.waits if w)}"
        flag = "" if b.fits else "  DOES NOT FIT"
        print(
            f"sm_{b.arch:<4}{b.config:<40} {b.registers:>4} registers  {b.spill_bytes:>5} B spilled"
            f"  {b.shared_bytes:>7} B shared{layout}{work}{flag}",
            flush=True,
        )
    bad = [b for b in found if not b.fits]
    print(f"{len(found)} compiled, {len(bad)} do not fit")
    if args.json:
        args.json.write_text(json.dumps([{**asdict(b), "fits": b.fits} for b in found], indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
