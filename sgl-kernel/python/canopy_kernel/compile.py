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
MAX_SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""Maximum shared memory of one block (CUDA programming guide, compute capabilities)."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One compiled kernel: registers per thread, bytes of spills and of shared memory."""

    kernel: str
    arch: int
    config: str
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        return self.spill_bytes == 0 and self.shared_bytes <= MAX_SHARED_BYTES[self.arch]


def matching_specialisations(
    arches: tuple[int, ...], match: str
) -> Iterator[tuple[int, Specialisation]]:
    """Yield each chip's specialisations whose names contain ``match``."""
    for arch in arches:
        yield from ((arch, one) for one in specialisations(arch) if match in one.name)


def compile_specialisation(specialisation: Specialisation, arch: int) -> CompiledKernel:
    """Compile one specialisation for one chip. Raises RuntimeError under the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels cannot be compiled; unset it")
    names, constants = specialisation.kernel.arg_names, specialisation.constants
    types = dict.fromkeys(names, "i32") | specialisation.pointers
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith(("_row", "_page", "_token", "_head"))
    }
    binary = triton.compile(
        ASTSource(specialisation.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": specialisation.warps, "num_stages": specialisation.stages},
    )
    registers, spill_bytes = _read_resources(binary.asm["ptx"], arch)
    config = specialisation.name
    shared_bytes = binary.metadata.shared
    return CompiledKernel(config.split()[0], arch, config, registers, spill_bytes, shared_bytes)


def _read_resources(ptx: str, arch: int) -> tuple[int, int]:
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
    kernels = []
    for arch, specialisation in matching_specialisations(tuple(args.arch or ARCHES), args.match):
        kernel = compile_specialisation(specialisation, arch)
        kernels.append(kernel)
        print(
            f"sm_{kernel.arch:<4}{kernel.config:<40} {kernel.registers:>4} registers"
            f"  {kernel.spill_bytes:>5} B spilled  {kernel.shared_bytes:>7} B shared"
            f"{'' if kernel.fits else '  DOES NOT FIT'}",
            flush=True,
        )
    oversized = sum(not kernel.fits for kernel in kernels)
    print(f"{len(kernels)} compiled, {oversized} do not fit")
    if args.json:
        rows = [{**asdict(kernel), "fits": kernel.fits} for kernel in kernels]
        args.json.write_text(json.dumps(rows, indent=1))
    return 1 if oversized else 0


if __name__ == "__main__":
    sys.exit(main())
