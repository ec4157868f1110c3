"""Compile every shipped specialisation ahead of time, without a GPU, and report its resources.

    python -m canopy_kernel.compile [--json FILE] [--match TEXT] [--arch 90]

Fails on register spills, on more shared memory per block than the chip has, and on matrix instructions
that repeat work (two groups of warps computing the same scores). Wrong results are found by tests under
the interpreter, slow kernels only on a GPU.
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
"""Maximum shared memory of one block (CUDA programming guide, compute capabilities)."""
RESERVED_BYTES = 1024
"""Additional shared memory per block, reserved by the system. A multiprocessor has this plus the
maximum of one block."""
REGISTERS = 65_536
WARPS = 64
"""Registers and warps per multiprocessor on all three chips; warps get registers in units of 256."""


@dataclass(frozen=True, slots=True)
class Built:
    """One compiled kernel: registers per thread, bytes of spills and of shared memory.

    dots: each matrix product "MxNxK" with its warps along rows and columns of the result; empty for
    products in tensor memory (sm_100) or without matrix units. matrix_work: FLOPs of the machine's
    matrix instructions divided by FLOPs of the products; 1 without repetition, None without such
    instructions. programs: concurrent programs per multiprocessor. waits: per loop, the counts of its
    ``async_wait`` instructions, that is the loads that may still be pending; 0 waits for all.
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
    """Yield each chip's specialisations whose names contain one of ``matches`` (``exact``: end with it)
    and start with ``kernel``."""
    for arch in arches:
        for s in specialisations(arch):
            named = s.name.endswith(matches) if exact else any(m in s.name for m in matches)
            if named and s.name.startswith(kernel):
                yield arch, s


def compiled(s: Specialisation, arch: int) -> Built:
    """Compile one specialisation for one chip. Raises RuntimeError under the interpreter."""
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
    """Return the concurrent programs of a compiled kernel per multiprocessor."""
    a_warp = -(-registers * 32 // 256) * 256
    shared = (SHARED_BYTES[arch] + RESERVED_BYTES) // (shared_bytes + RESERVED_BYTES)
    return min(REGISTERS // (a_warp * warps), WARPS // warps, shared)


def loop_waits(ttgir: str) -> tuple[tuple[int, ...], ...]:
    """Return the ``async_wait`` counts of each loop's body, in source order."""
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
    """Return the shape and warps of each matrix product, and the total FLOPs."""
    warps = {name: (int(a), int(b)) for name, a, b in _MMA.findall(ttgir)}
    found, work = [], 0.0
    for m, k, _, n, layout in _DOT.findall(ttgir):
        if layout in warps:
            found.append((f"{m}x{n}x{k}", warps[layout]))
            work += 2.0 * int(m) * int(n) * int(k)
    return tuple(found), work


def matrix_flops(ptx: str, warps: int) -> float:
    """Return the FLOPs of one pass over the matrix instructions of a program of ``warps`` warps.

    Each group of four warps runs a ``wgmma``; each warp runs an ``mma.sync``.
    """
    total = 0.0
    for kind, m, n, k in re.findall(
        r"^\s+(wgmma\.mma_async|mma)\.sync.*?m(\d+)n(\d+)k(\d+)", ptx, re.M
    ):
        groups = warps // 4 if kind.startswith("wgmma") else warps
        total += 2.0 * int(m) * int(n) * int(k) * groups
    return total


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Return registers and spill bytes, as reported by ptxas."""
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
    """Return the architecture in :data:`ARCHES` to compile for, given a compute capability."""
    return max((arch for arch in ARCHES if arch <= 10 * major + minor), default=ARCHES[0])


def main() -> int:
    """Compile all, print a table, and return 1 if a kernel does not fit."""
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
