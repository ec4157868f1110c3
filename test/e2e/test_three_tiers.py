"""Real servers with device, host and disk: same answers, and a restart that finds its pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_three_tiers_answer_alike_and_a_restart_is_served_from_disk(tiny_model):
    command = [sys.executable, str(ROOT / "benchmark" / "tiers" / "live.py")]
    command += ["--model", str(tiny_model), "--prompts", "60", "--kills", "0", "--tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["wrong"] == result["restart"]["wrong"] == 0
    assert min(result["hits"].values()) > 0, result["hits"]
    assert result["restart"]["from_storage"] >= 0.95 * result["restart"]["tokens"]
