"""FlashInfer's customised attention with our mask by position: generated, and compiled by nvcc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
flashinfer = pytest.importorskip(
    "flashinfer", reason="flashinfer-python is not installed", exc_type=ImportError
)

from canopy_kernel.flashinfer_attention import VARIANT_NAME, jit_arguments  # noqa: E402

COMPILE_S = 400
GENERATE = """
import sys, torch
from canopy_kernel.flashinfer_attention import jit_arguments
from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module as generate
from flashinfer.jit import env
import tvm_ffi
spec = generate("fa2", *jit_arguments(int(sys.argv[1]), torch.bfloat16))
print("folder", spec.sources[0].parent)
include = [env.FLASHINFER_INCLUDE_DIR, env.FLASHINFER_CSRC_DIR, *env.CUTLASS_INCLUDE_DIRS]
include += [env.SPDLOG_INCLUDE_DIR, *env.CCCL_INCLUDE_DIRS, tvm_ffi.libinfo.find_include_path()]
for path in include:
    print("include", path)
"""


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """FlashInfer's generated folder for head size 128, and the include paths it needs."""
    base = tmp_path_factory.mktemp("flashinfer")
    environment = {
        **os.environ,
        "FLASHINFER_WORKSPACE_BASE": str(base),
        "FLASHINFER_CUDA_ARCH_LIST": "8.0 9.0a",
    }
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, "128"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = [line.split(" ", 1) for line in done.stdout.splitlines() if " " in line]
    folder = next(path for word, path in said if word == "folder")
    return folder, [path for word, path in said if word == "include"]


def test_the_generated_source_carries_our_mask(generated):
    folder, _ = generated
    with open(f"{folder}/batch_prefill_config.inc") as f:
        config = f.read()
    assert f"struct {VARIANT_NAME} : AttentionVariantBase" in config
    assert "int32_t* query_positions;" in config
    assert "params.query_positions[first_row + row]" in config


def test_the_arguments_name_type_and_head_size():
    uris = {jit_arguments(d, t)[0] for d in (64, 128) for t in (torch.float16, torch.bfloat16)}
    assert len(uris) == 4


@pytest.mark.timeout(2 * COMPILE_S)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the path")
@pytest.mark.parametrize("arch", [80, 90])
def test_nvcc_compiles_the_kernel_that_owns_its_mask(generated, arch, tmp_path):
    """One tile size of the custom-mask mode: the only mode this variant is run in."""
    folder, include = generated
    with open(f"{folder}/batch_prefill_paged_kernel_mask_2.cu") as f:
        source = f.read()
    assert "MaskMode::kCustom" in source
    one = source.replace("template cudaError_t", "extern template cudaError_t")
    at = one.index("extern template cudaError_t")
    one = one[:at] + one[at + len("extern ") :]
    source_file, object_file = tmp_path / "one.cu", tmp_path / "one.o"
    source_file.write_text(one)
    flags = [f"-I{path}" for path in [folder, *include]]
    flags += ["-DFLASHINFER_ENABLE_F16", "-DFLASHINFER_ENABLE_BF16", "-DNDEBUG", "-O1"]
    chip = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    done = subprocess.run(
        [
            "nvcc",
            "-std=c++17",
            "-use_fast_math",
            chip,
            *flags,
            "-c",
            source_file,
            "-o",
            object_file,
        ],
        capture_output=True,
        text=True,
        timeout=COMPILE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert object_file.stat().st_size > 1000
