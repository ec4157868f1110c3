"""docs/reference/: the generated pages match the code."""

import re
import sys
from pathlib import Path

import pytest

from support import forked

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
pytest.importorskip("fastapi", reason="fastapi is not installed: the routes cannot be listed")


def test_the_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reference_docs.py"), "--check"]
    result = forked.run(command, cwd=ROOT)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}\nrun: {' '.join(command[:2])}"


def test_every_route_is_described() -> None:
    page = (REFERENCE / "http-routes.md").read_text(encoding="utf-8")
    generated, written = page.split("<!-- end: routes -->")
    paths = re.findall(r"`(/canopy/[\w/]+)", generated)
    assert paths
    assert not [path for path in paths if path.rstrip("/") not in written]
