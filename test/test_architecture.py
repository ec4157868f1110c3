"""The packages compared with `scripts/layout.py`: directions of imports, cycles, and lengths of files."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

import layout
from layout import PYTHON, folder_of, source_files

MAX_LINES = 400
MODULES = {
    ".".join(path.relative_to(PYTHON).with_suffix("").parts).removesuffix(".__init__"): path
    for path in source_files()
}


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the dotted names that ``path`` imports, in functions and for type checks too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(names)


def modules_in(path: Path) -> set[str]:
    """Return the package's modules that ``path`` imports. A package counts if a name is imported from it."""
    modules = set()
    for name in names_in(path):
        if name in MODULES and (name in layout.PACKAGES or MODULES[name] != path):
            has_submodule = any(m.startswith(f"{name}.") for m in names_in(path) & MODULES.keys())
            if not has_submodule:
                modules.add(name)
    return modules


def test_every_file_is_in_a_folder_of_the_layout() -> None:
    folders = {folder_of(path) for path in source_files()}
    assert folders - layout.OPEN_FILES == set(layout.ALLOWED_IMPORTS)


@pytest.mark.parametrize("folder", sorted(layout.ALLOWED_IMPORTS))
def test_a_folder_imports_only_allowed_folders(folder: str) -> None:
    for path in source_files():
        if folder_of(path) != folder:
            continue
        imported = {folder_of(MODULES[m]) for m in modules_in(path)} - layout.OPEN_FILES - {folder}
        forbidden = imported - layout.ALLOWED_IMPORTS[folder]
        assert not forbidden, f"{path.relative_to(PYTHON)} imports {forbidden}"


def test_open_files_import_only_each_other() -> None:
    for path in source_files():
        if folder_of(path) in layout.OPEN_FILES:
            imported = {folder_of(MODULES[name]) for name in modules_in(path)}
            forbidden = imported - layout.OPEN_FILES
            assert not forbidden, f"{path.name} imports {forbidden}"


def test_no_two_folders_import_each_other() -> None:
    assert nodes_on_cycles(layout.ALLOWED_IMPORTS) == []


def test_no_file_imports_itself_through_others() -> None:
    assert nodes_on_cycles({name: modules_in(path) for name, path in MODULES.items()}) == []


def nodes_on_cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes that can be reached from themselves."""
    cyclic_nodes = []
    for origin in graph:
        reached: set[str] = set()
        stack = list(graph[origin])
        while stack:
            node = stack.pop()
            if node not in reached:
                reached.add(node)
                stack += graph.get(node, ())
        if origin in reached:
            cyclic_nodes.append(origin)
    return cyclic_nodes


@pytest.mark.parametrize("folder", layout.PLAIN_FOLDERS)
def test_the_laboratory_imports_neither_torch_nor_sglang_at_the_top(folder: str) -> None:
    for path in source_files():
        if folder_of(path) != folder:
            continue
        statements = ast.parse(path.read_text(encoding="utf-8")).body
        names = {a.name for node in statements if isinstance(node, ast.Import) for a in node.names}
        names |= {node.module or "" for node in statements if isinstance(node, ast.ImportFrom)}
        packages = {name.split(".")[0] for name in names}
        assert not packages & {"torch", "sglang", "transformers"}, path


def test_only_the_server_facing_folders_import_sglang() -> None:
    importing_folders = {
        folder_of(path)
        for path in source_files()
        if any(name == "sglang" or name.startswith("sglang.") for name in names_in(path))
    }
    assert importing_folders <= layout.SGLANG_FOLDERS


def test_one_file_has_what_differs_between_releases_of_sglang() -> None:
    versions = re.compile(
        r"SGLANG_VERSION|releases\.TESTED|hasattr\((MatchResult|scheduler, \"(_|send))"
    )
    matching = {
        path.relative_to(PYTHON).as_posix()
        for path in source_files()
        if versions.search(path.read_text(encoding="utf-8")) and "__init__" not in path.name
    }
    # The others show the version, or warn of an untested one.
    exempt_names = {"doctor/command_line.py", "doctor/machine.py", "server/start/self_check.py"}
    exempt = {f"sglang_canopy/{name}" for name in exempt_names}
    exempt |= {"canopy_lab/live/replay/replay_run.py"}
    assert matching - exempt == {"sglang_canopy/releases.py"}


def test_no_file_is_too_long() -> None:
    lines_by_file = {}
    for path in source_files():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines >= MAX_LINES:
            lines_by_file[str(path.relative_to(PYTHON))] = lines
    assert lines_by_file == {}


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, canopy_lab.cli.main as m; m.main(['--version'])"
    check_code = f"try:\n    {code}\nexcept SystemExit:\n    print('torch' in sys.modules)"
    command = [sys.executable, "-c", f"import sys\n{check_code}"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stdout.strip().endswith("False"), process.stdout + process.stderr


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports test files by name alone, and leaves out the second of two."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
