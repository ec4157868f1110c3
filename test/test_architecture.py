"""Dependencies run one way, and the parts for laptops need neither torch nor sglang."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "sglang_canopy"

MAY_USE = {
    "policy": {"reuse"},
    "reuse": {"policy"},  # the records of policy/base.py, see test_reuse_knows_only_the_contract
    "trace": set(),
    "tier": {"policy"},
    "sim": {"policy", "reuse", "tier", "trace"},
    "plan": {"policy", "reuse", "sim", "tier", "trace"},
    "radix": {"policy", "reuse", "tier", "config", "request"},
    "characterize": {"policy", "reuse", "sim", "trace", "report"},
    # access, config, request: for chunk/server/, which has flags and routes and reads the stamp
    "chunk": {"access", "config", "models", "policy", "request"},
    "cpu": set(),
    "models": set(),
    "report": {"characterize", "plan", "sim"},
    "top": {"policy"},
    "config": {"policy", "tier"},
    "request": {"policy"},
    "hints": {"request"},
    "access": set(),
    "client_hints": {"access"},
}
"""Room -> the rooms it may import. ``errors``, ``private_file``, ``tenant`` and the package itself are open to all."""

LIGHT = ("policy", "reuse", "tier", "sim", "trace", "characterize", "plan", "report")


def imports_of(path: Path) -> set[str]:
    """Top-level modules of the package that ``path`` imports, and other packages' names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            found.add(parts[1] if parts[0] == "sglang_canopy" and len(parts) > 1 else parts[0])
    return found


def files_of(room: str) -> list[Path]:
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]


ROOMS = {p.stem for p in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir() if p.is_dir()}


@pytest.mark.parametrize("room", sorted(set(MAY_USE) & ROOMS))
def test_a_room_imports_only_what_it_may(room: str) -> None:
    open_to_all = {room, "errors", "private_file", "tenant", "__init__", "__version__"}
    open_to_all.add("SGLANG_VERSION")
    for path in files_of(room):
        used = (imports_of(path) & ROOMS) - open_to_all
        assert used <= MAY_USE[room], f"{path.relative_to(PACKAGE)} imports {used - MAY_USE[room]}"


def test_reuse_knows_only_the_contract_of_policies() -> None:
    for path in files_of("reuse"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "sglang_canopy.policy" in line:
                assert "sglang_canopy.policy.base" in line, f"{path.name}: {line}"


@pytest.mark.parametrize("room", LIGHT)
def test_the_laboratory_needs_neither_torch_nor_sglang(room: str) -> None:
    for path in files_of(room):
        assert not imports_of(path) & {"torch", "sglang", "transformers"}, path


def test_only_the_server_facing_rooms_touch_sglang() -> None:
    touching = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    touching = {path for path in touching if "sglang" in imports_of(PACKAGE / path)}
    rooms = {path.parts[0].removesuffix(".py") for path in touching}
    assert rooms <= {"plugin", "entry", "access", "radix", "cpu", "bench", "bench_serving", "chunk"}
    in_chunk = {path.parts[1] for path in touching if path.parts[0] == "chunk"}
    assert in_chunk <= {"server"}


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, sglang_canopy.cli.main as m; m.main(['--version'])"
    probe = f"try:\n    {code}\nexcept SystemExit:\n    print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{probe}"], capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("False"), done.stdout + done.stderr
