"""Compile every shipped specialisation ahead of time, without a GPU, and report its resources.

    python -m canopy_kernel.compile [--json FILE] [--match TEXT] [--arch 90]

Fails on register spills and on more shared memory per block than the chip has. Wrong results are found by
tests under the interpreter, slow kernels only on a GPU.
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


@dataclass(frozen=True, slots=True)
class Built:
    """One compiled kernel: registers per thread, bytes of spills and of shared memory."""

    kernel: str
    arch: int
    config: str
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        return self.spill_bytes == 0 and self.shared_bytes <= SHARED_BYTES[self.arch]


def matching_specialisations(
    arches: tuple[int, ...], match: str
) -> Iterator[tuple[int, Specialisation]]:
    """Yield each chip's specialisations whose names contain ``match``."""
    for arch in arches:
        yield from ((arch, s) for s in specialisations(arch) if match in s.name)


def compile_specialisation(s: Specialisation, arch: int) -> Built:
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
    binary = triton.compile(
        ASTSource(s.kernel, signature, s.constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": s.warps, "num_stages": s.stages},
    )
    registers, spills = _resources(binary.asm["ptx"], arch)
    return Built(s.name.split()[0], arch, s.name, registers, spills, binary.metadata.shared)


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Return registers and spill bytes, as reported by ptxas."""
    from triton import knobs

    assembler = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        chip = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        completed = subprocess.run(
            [assembler.path, "-v", f"--gpu-name={chip}", str(file), "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        )
    output = completed.stderr + completed.stdout
    registers = int(re.search(r"Used (\d+) registers", output).group(1))
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    return registers, int(spills.group(1)) + int(spills.group(2))


def main() -> int:
    """Compile all, print a table, and return 1 if a kernel does not fit."""
    parser = argparse.ArgumentParser(prog="canopy_kernel.compile", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--match", default="", help="only kernels whose name contains this")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHES, help="only this chip")
    args = parser.parse_args()
    built = []
    for arch, s in matching_specialisations(tuple(args.arch or ARCHES), args.match):
        b = compile_specialisation(s, arch)
        built.append(b)
        print(
            f"sm_{b.arch:<4}{b.config:<40} {b.registers:>4} registers  {b.spill_bytes:>5} B spilled"
            f"  {b.shared_bytes:>7} B shared{'' if b.fits else '  DOES NOT FIT'}",
            flush=True,
        )
    bad = sum(not b.fits for b in built)
    print(f"{len(built)} compiled, {bad} do not fit")
    if args.json:
        args.json.write_text(json.dumps([{**asdict(b), "fits": b.fits} for b in built], indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
