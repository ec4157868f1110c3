"""The GPU check's own arithmetic, which runs anywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmark" / "kernels"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import device_timing
    import gpu_check

    return device_timing, gpu_check


def test_a_time_is_compared_with_its_floor(scripts):
    timing, _ = scripts
    top = {"flop_per_second": 100.0, "bytes_per_second": 10.0}
    row = timing.against_floor("k", 4.0, timing.Cost(200.0, 10.0), top)
    assert row == {"k_s": 4.0, "k_times_floor": 2.0}  # 200 FLOPs at 100 a second


def test_every_aim_is_judged_by_the_report(scripts):
    _, check = scripts
    report = {
        "attention": [{"tokens": 8, "triton_times_floor": 1.6}],
        "movers": [{"tokens": 8, "kernel": "energy", "kernel_times_floor": 1.2}],
        "end_to_end": [
            {"tokens": 8, "ratio": 0.15, **check.compared(10.0, 2.0, 2.5, "asked")},
            {"failed": "out of memory"},
        ],
    }
    assert check.judge(report) == [
        "MISSED: triton at 8 tokens: 1.60 times its floor (aim 1.5)",
        "met: energy at 8 tokens: 1.20 times its floor (aim 1.5)",
        "MISSED: asked at 8 tokens: chunks read from pinned memory over the device 1.25 (aim 1.1)",
        "met: asked at 8 tokens: 5.00 times sooner than this model's own eager prefill (aim 4.86)",
    ]
    assert check.judge({"attention": [{"failed": "no"}]}) == []


def run(out, *flags, interpret="0"):
    report = out / "gpu_check.json"
    done = subprocess.run(
        [sys.executable, FOLDER / "gpu_check.py", "--json", report, *flags],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return done, json.loads(report.read_text())


@pytest.mark.long
def test_the_smoke_run_covers_every_section(tmp_path):
    done, report = run(tmp_path, "--smoke", interpret="1")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = report["end_to_end"]
    timed = {key.removesuffix("_host_over_device") for key in row if key.endswith("over_device")}
    assert timed
    assert all({f"host_{name}_s", f"device_{name}_s"} <= set(row) for name in timed)
    assert all(case["ok"] for case in report["correctness"])
