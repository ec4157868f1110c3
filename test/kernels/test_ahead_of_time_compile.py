"""Kernels compile for real chips without one: no spills, no repeated matrix work, and they fit."""

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

from canopy_kernel import compile as ahead  # noqa: E402
from canopy_kernel import triton_attention  # noqa: E402
from canopy_kernel.specialisations import specialisations  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
KNOWN = {
    (b["arch"], b["config"]): b
    for b in json.loads((ROOT / "benchmark" / "kernels" / "compiled.json").read_text())
}
"""Source of the table in docs/research/documents.md."""


def built(tmp_path, match, *options):
    """Return the output of `python -m canopy_kernel.compile` for names with ``match``."""
    out, command = tmp_path / "built.json", "-m canopy_kernel.compile"
    done = subprocess.run(
        [sys.executable, *command.split(), "--match", match, "--json", str(out), *options],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    found = json.loads(out.read_text()) if out.exists() else []
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(b["registers"] > 0 for b in found)
    assert all(b["spill_bytes"] == 0 for b in found)
    assert all(b["shared_bytes"] <= ahead.SHARED_BYTES[b["arch"]] for b in found)
    for b in found:
        assert KNOWN.get((b["arch"], b["config"]), b) == b, "write the table's file anew"
    return found


@cache
def kernels_in_the_source() -> set[str]:
    """The functions under ``@triton.jit`` that no other such function calls: they are launched."""
    jitted: dict[str, set[str]] = {}
    for folder in ("python", "sgl-kernel", "benchmark", "scripts"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            for one in ast.walk(ast.parse(text)) if "triton.jit" in text else ():
                if not isinstance(one, ast.FunctionDef):
                    continue
                if any(ast.unparse(d).startswith("triton.jit") for d in one.decorator_list):
                    names = (n.id for n in ast.walk(one) if isinstance(n, ast.Name))
                    jitted[one.name] = set(names) - {one.name}
    return set(jitted) - set().union(*jitted.values())


@pytest.mark.parametrize("arch", ahead.ARCHES)
def test_every_kernel_is_compiled_ahead_of_time(arch):
    found = {s.kernel.__name__ for s in specialisations(arch)}
    assert found == kernels_in_the_source()


def check_layouts(found):
    """Tiles of many rows give each warp rows of its own; no product is computed twice."""
    for b in found:
        if b["kernel"] != "sparse_prefill" or " fp32 " in b["config"]:
            continue
        if b["arch"] < 100:
            assert b["matrix_work"] == 1.0, b
            assert len(b["dots"]) >= 2
        if "few_rows" not in b["config"] and " d256 " not in b["config"]:
            assert all(columns == 1 for _, (_, columns) in b["dots"]), b


def check_pipeline(found):
    """Both loops over keys run ahead of their loads, and the tiles are cut for the programs that a
    multiprocessor really holds: in what runs, which is pages of one token wherever Triton is alone."""
    for b in found:
        what, dim = b["config"].split()[1:3]
        few, split, after = (x in what for x in ("few_rows", "split", "continued"))
        config = triton_attention.configuration(
            int(dim[1:]), torch.bfloat16, few, b["arch"], split, after
        )
        if after or b["config"].endswith(" page1"):
            assert b["programs"] >= config.programs, b
        if split and b["config"].endswith(" page1"):  # what the work list is made for
            assert b["programs"] == config.programs, b
        if b["arch"] < 100:
            assert len(b["waits"]) == 2, b
            assert all(len(w) and min(w) == 4 for w in b["waits"]), b


OTHERS = ["rope_scatter d128 bf16 page1", "merge_parts rows d128 bf16", "energy bf16"]
"""The mover of rows, the merge of parts and the energies: with attention, all kernels there are."""


@pytest.fixture(scope="module")
def hopper(tmp_path_factory):
    """Each kernel at head size 128, compiled by one command."""
    more = [word for name in OTHERS[1:] for word in ("--match", name)]
    folder = tmp_path_factory.mktemp("hopper")
    return built(folder, "d128 bf16 page1", *more, "--exact", "--arch", "90")


@pytest.mark.timeout(600)
def test_attention_runs_ahead_of_its_loads_with_a_row_of_warps_and_no_spill(hopper):
    attention = [b for b in hopper if b["kernel"] == "sparse_prefill"]
    kinds = {b["config"].split()[1] for b in attention}
    assert len(attention) == 5
    assert {"rows", "few_rows"} <= kinds
    check_pipeline(attention)
    check_layouts(attention)


@pytest.mark.timeout(600)
def test_every_other_kernel_fits(hopper):
    others = [b for b in hopper if b["kernel"] != "sparse_prefill"]
    assert {b["config"] for b in others} == set(OTHERS)
    kinds = {s.name.split()[0] for s in specialisations(90)}
    assert {b["kernel"] for b in hopper} == kinds


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ahead.ARCHES)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_every_configuration_of_16_bits_fits(arch, kind, tmp_path):
    """The page size changes the arithmetic of an address alone; pages of 1 and of 16 stand for all."""
    for page in ("1", "16"):
        found = built(tmp_path, f"{kind} page{page}", "--exact", "--arch", str(arch))
        check_layouts(found)
        check_pipeline([b for b in found if b["kernel"] == "sparse_prefill"])
    built(tmp_path, f" {kind}", "--exact", "--arch", str(arch))


TTGIR = """
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = [16, 32, 16]}>
  %s = ttng.warp_group_dot %q, %k, %c : !ttg.memdesc<64x128xbf16, #shared> * !ttg.memdesc<128x64xbf16, #shared1> -> tensor<64x64xf32, #mma>
"""
PTX = "\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1};\n" * 8


def test_work_that_two_groups_of_warps_repeat_is_seen():
    """64 rows on 8 warps: both groups of 4 run instructions of 64 rows over the same scores."""
    dots, work = ahead.products(TTGIR)
    assert dots == (("64x64x128", (8, 1)),)
    assert ahead.matrix_flops(PTX, 8) / work == 2.0
    assert ahead.matrix_flops(PTX, 4) / work == 1.0
    assert ahead.matrix_flops("\tmma.sync.aligned.m16n8k16.row.col.f32.f16 {};\n", 4) == 4 * 4096


LOOPS = """
    %a = ttg.async_wait %x {num = 2 : i32}
    %b = scf.for %i = %c0 to %n step %c64 {
      %c = ttg.async_wait %x {num = 4 : i32}
      scf.yield
    }
    %d = ttg.async_wait {num = 0 : i32}
    %e = scf.for %i = %n to %m step %c64 {
      %f = ttg.async_wait %x {num = 0 : i32}
    }
"""


def test_only_waits_inside_a_loop_count():
    assert ahead.loop_waits(LOOPS) == ((4,), (0,))


def test_programs_a_multiprocessor_by_registers_warps_and_shared_memory():
    assert ahead.programs(190, 8, 133_120, 90) == 1  # 192 registers x 256 threads are 49,152
    assert ahead.programs(127, 8, 67_584, 90) == 2
    assert ahead.programs(32, 8, 1024, 90) == 8  # no more than 64 warps
    assert ahead.programs(96, 4, 73_728, 80) == 2  # shared memory: 164 KiB
    assert ahead.programs(64, 4, ahead.SHARED_BYTES[90], 90) == 1


def test_a_chip_takes_the_kernels_of_the_nearest_below():
    assert [ahead.like(*c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        80, 80, 90, 100, 100,
    ]  # fmt: skip
