"""The bundle for a GPU machine without a network: excluded files, stand-ins, refusals."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUNDLE_FOLDER = ROOT / "scripts" / "gpu_bundle"


def test_a_wheel_is_slimmed_and_still_a_wheel(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BUNDLE_FOLDER))
    import slim_wheel

    kept_files = ["sglang/srt/server.py", "sglang/benchmark/serving.py", "sglang/a,b.py"]
    dropped_files = [
        "sglang/multimodal_gen/big.py",
        "sglang/test/test_x.py",
        "sglang/benchmark/other.py",
        "sglang/srt/mem_cache/rust_tree_core/core.so",
    ]
    wheel = tmp_path / "sglang-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*kept_files, *dropped_files, "sglang-1.dist-info/RECORD"]:
            archive.writestr(name, name)
    slimmed = slim_wheel.slim(wheel, tmp_path / "slim")
    with zipfile.ZipFile(slimmed) as archive:
        assert archive.namelist() == [*kept_files, "sglang-1.dist-info/RECORD"]
        record = archive.read("sglang-1.dist-info/RECORD").decode().splitlines()
    assert record[:3] == [
        "sglang/srt/server.py,,",
        "sglang/benchmark/serving.py,,",
        '"sglang/a,b.py",,',
    ]
    assert record[-1] == "sglang-1.dist-info/RECORD,,"


STAND_IN_CHECKS = """
import torch
import sgl_kernel
from sgl_kernel import some_kernel_nobody_has, silu_and_mul
from sgl_kernel.kvcacheio import transfer_kv_direct
from sgl_kernel.utils import is_arch_support_pdl

x = torch.randn(3, 8)
assert torch.allclose(silu_and_mul(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
probs = torch.tensor([[0.4, 0.1, 0.3, 0.2]])
is_close = lambda probs, expected: torch.allclose(probs, torch.tensor([expected]))
assert is_close(sgl_kernel.top_k_renorm_prob(probs, 2), [4 / 7, 0, 3 / 7, 0])
assert is_close(sgl_kernel.top_k_renorm_prob(probs, torch.tensor([1])), [1.0, 0, 0, 0])
assert is_close(sgl_kernel.top_p_renorm_prob(probs, 0.6), [4 / 7, 0, 3 / 7, 0])
assert is_close(sgl_kernel.top_p_renorm_prob(probs, 0.3), [1.0, 0, 0, 0])
source, target = torch.arange(8.0).reshape(1, 8, 1), torch.zeros(1, 8, 1)
transfer_kv_direct(source, target, torch.tensor([1, 2]), torch.tensor([5, 0]), 1)
assert target[0, :, 0].tolist() == [2, 0, 0, 0, 0, 1, 0, 0]
assert not is_arch_support_pdl()
assert not hasattr(sgl_kernel, "scalar_type")
try:
    some_kernel_nobody_has()
except NotImplementedError as error:
    print(error)
"""


def test_stand_ins_compute_what_a_llama_needs_and_name_what_is_missing():
    pytest.importorskip("torch")
    process = subprocess.run(
        [sys.executable, "-c", STAND_IN_CHECKS],
        env={**os.environ, "PYTHONPATH": str(BUNDLE_FOLDER / "stand_in")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert (
        "sgl_kernel.some_kernel_nobody_has: compiled kernels are not on this machine"
        in process.stdout
    )


def run_bundle(*args):
    command = ["bash", ROOT / "scripts" / "gpu_bundle.sh", *args]
    return subprocess.run(command, capture_output=True, text=True)


def test_unbundleable_requirements_are_refused_before_any_download(tmp_path):
    assert "usage" in run_bundle().stderr
    no_tokenizer = run_bundle(tmp_path / "out", tmp_path)
    assert no_tokenizer.returncode == 2
    assert "has no tokenizer*.json" in no_tokenizer.stderr
    (tmp_path / "old" / "wheels").mkdir(parents=True)
    assert "is a bundle already" in run_bundle(tmp_path / "old", tmp_path).stderr


def test_the_bundle_has_the_supported_sglang():
    from sglang_canopy import SGLANG_VERSION

    lines = (ROOT / "requirements" / "gpu-bundle.txt").read_text().splitlines()
    assert f"sglang=={SGLANG_VERSION}" in lines
    requirements = [line for line in lines if not line.startswith("#")]
    assert all("==" in line for line in requirements)
    names = {line.split("==")[0] for line in requirements}
    assert not names & {"torch", "triton", "transformers", "numpy"}
