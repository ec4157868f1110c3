"""Kernels compile for real chips without one: no spills, no more shared memory than there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")


def test_the_largest_specialisations_fit_on_sm_80_and_sm_90(tmp_path):
    """Page size 1 in 16 bits takes the most registers; `python -m canopy_kernel.compile` does all."""
    out = tmp_path / "built.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "canopy_kernel.compile",
            "--match",
            "d128 bf16 page1",
            "--exact",
            "--json",
            out,
        ],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = json.loads(out.read_text())
    assert {b["arch"] for b in built} == {80, 90}
    assert {b["kernel"] for b in built} == {"sparse_prefill", "rope_scatter", "fuse", "correct"}
    assert all(b["registers"] > 0 for b in built)
