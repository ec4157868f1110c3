"""Kernels compile for real chips without a chip: they spill no register and fit the shared memory."""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from canopy_kernel import compile as compiler  # noqa: E402
from canopy_kernel.specialisations import specialisations  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
COMPILED = {
    (build["arch"], build["config"]): build
    for build in json.loads((ROOT / "benchmark" / "kernels" / "compiled.json").read_text())
}
"""By architecture and configuration; the source of the table in docs/research/documents.md."""


def compile_kernels(tmp_path, name_part, *options):
    """Return the output of `python -m canopy_kernel.compile` for names with ``match``."""
    out, command = tmp_path / "built.json", "-m canopy_kernel.compile"
    process = subprocess.run(
        [sys.executable, *command.split(), "--match", name_part, "--json", str(out), *options],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    builds = json.loads(out.read_text()) if out.exists() else []
    assert process.returncode == 0, process.stdout + process.stderr
    assert builds
    assert all(build["registers"] > 0 for build in builds)
    assert all(build["spill_bytes"] == 0 for build in builds)
    assert all(b["shared_bytes"] <= compiler.MAX_SHARED_BYTES[b["arch"]] for b in builds)
    for build in builds:
        assert COMPILED.get((build["arch"], build["config"]), build) == build, "write the file anew"
    return builds


@cache
def kernels_in_the_source() -> set[str]:
    """Return the ``@triton.jit`` functions that no other such function calls: they are launched."""
    jitted: dict[str, set[str]] = {}
    for folder in ("python", "sgl-kernel", "benchmark", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            for function in ast.walk(ast.parse(text)) if "triton.jit" in text else ():
                if not isinstance(function, ast.FunctionDef):
                    continue
                if any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list):
                    names = (node.id for node in ast.walk(function) if isinstance(node, ast.Name))
                    jitted[function.name] = set(names) - {function.name}
    return set(jitted) - set().union(*jitted.values())


@pytest.mark.parametrize("arch", compiler.ARCHES)
def test_every_kernel_is_compiled_ahead_of_time(arch):
    names = {build.kernel.__name__ for build in specialisations(arch)}
    assert names == kernels_in_the_source()


@pytest.mark.timeout(600)
def test_attention_of_hopper_fits(tmp_path):
    """At head size 128 in bf16; every kernel and chip: ``pytest --all``."""
    builds = compile_kernels(tmp_path, "few_rows_split d128 bf16 page1", "--arch", "90")
    assert {build["config"].split()[1] for build in builds} == {"few_rows_split"}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", compiler.ARCHES)
def test_every_configuration_of_bf16_fits(arch, tmp_path):
    compile_kernels(tmp_path, " bf16", "--arch", str(arch))
