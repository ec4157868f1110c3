"""The GPU check's smoke run, which runs anywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

CHECK_SCRIPT = Path(__file__).resolve().parents[2] / "benchmark" / "kernels" / "gpu_check.py"


@pytest.mark.long
def test_the_smoke_run_covers_every_section(tmp_path):
    out = tmp_path / "gpu_check.json"
    process = subprocess.run(
        [sys.executable, CHECK_SCRIPT, "--json", out, "--smoke"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(out.read_text())
    (row,) = report["end_to_end"]
    timed = {key.removesuffix("_host_over_device") for key in row if key.endswith("over_device")}
    assert timed
    assert all({f"host_{name}_s", f"device_{name}_s"} <= set(row) for name in timed)
    assert all(case["ok"] for case in report["correctness"])
