"""Two processes that are two ranks of one server, for one scenario."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
PATIENCE_S = 240


def on_two_ranks(
    scenario: str, folder: Path, worker: str, patience_s: float = PATIENCE_S
) -> tuple[Any, Any]:
    """What the two ranks of ``worker`` print of ``scenario``."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", worker, scenario, str(rank), str(folder)],
            cwd=TESTS,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [rank.communicate(timeout=patience_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, done):
        assert rank.returncode == 0, errors[-3000:]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in done)
    return first, second
