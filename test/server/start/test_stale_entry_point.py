"""A server whose installed entry point is older than its code does not start without Canopy."""

import sys
from pathlib import Path

import pytest

from support import forked

LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
from sglang.srt.plugins import load_plugins
load_plugins()
print("served")
"""
METADATA = "Metadata-Version: 2.1\nName: sglang-canopy\nVersion: 0.0.1\n"


@pytest.mark.parametrize(
    "module",
    [
        "sglang_canopy.server.plugin",
        pytest.param("sglang_canopy.gone.plugin", marks=pytest.mark.long),
    ],
)
def test_a_stale_entry_point_stops_the_process_with_the_remedy(tmp_path: Path, module) -> None:
    info = tmp_path / "sglang_canopy-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ncanopy = {module}:load\n")
    done = forked.run([sys.executable, "-c", LOAD, str(tmp_path)], timeout=280)
    assert "served" not in done.stdout
    assert done.returncode != 0
    assert f"names {module}, which this version does not have" in done.stderr
    assert "pip install" in done.stderr
