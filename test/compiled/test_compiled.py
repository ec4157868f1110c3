"""The compiled simulator: the same figures, used only where it is of these very sources."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from canopy_lab.compiled import build as building
from canopy_lab.compiled import modules
from canopy_lab.compiled.finder import is_own, use
from sglang_canopy.errors import CanopyError

ROOT = Path(__file__).resolve().parents[2]


def run(*given, home, **environment):
    """A Python process whose cache is ``home``."""
    return subprocess.run(
        [sys.executable, *map(str, given)],
        env={**os.environ, "XDG_CACHE_HOME": str(home), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_every_module_is_there_and_none_twice():
    assert len(set(modules.MODULES)) == len(modules.MODULES)
    for name in modules.MODULES:
        assert modules.source_of(name).is_file(), name


def test_other_sources_are_another_folder(tmp_path, monkeypatch):
    before = modules.folder()
    assert before == modules.folder()
    for name in modules.MODULES:
        at = tmp_path / modules.source_of(name).relative_to(modules.SOURCES)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(modules.source_of(name).read_bytes())
    monkeypatch.setattr(modules, "SOURCES", tmp_path)
    assert modules.folder() == before
    with modules.source_of(modules.MODULES[-1]).open("a") as file:
        file.write("# one more line\n")
    assert modules.folder() != before


def test_only_a_folder_of_ones_own_is_taken(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    assert is_own(mine)
    mine.chmod(0o770)
    assert not is_own(mine)
    mine.chmod(0o755)
    link = tmp_path / "link"
    link.symlink_to(mine)
    assert not is_own(link)  # whose it is may change
    assert not is_own(tmp_path / "none")


def test_what_has_been_imported_as_python_stays_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    import sglang_canopy.records  # noqa: F401

    modules.folder().mkdir(parents=True)
    assert use() is False


def test_half_of_a_build_is_not_taken(tmp_path):
    done = run(
        "-c",
        "from canopy_lab.compiled import modules, finder\n"
        "modules.folder().mkdir(parents=True, mode=0o700)\n"
        "print(finder.use())",
        home=tmp_path,
    )
    assert done.stdout == "False\n", done.stderr


def test_what_compiling_needs_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "NEEDS", ("mypy", "no_such_module"))
    with pytest.raises(CanopyError, match=r"needs no_such_module: pip install"):
        building.build()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.long
def test_without_a_c_compiler_nothing_is_left(tmp_path):
    done = run("-m", "canopy_lab.cli.main", "compile", home=tmp_path, CC="/no/such/compiler")
    assert done.returncode == 2
    assert "a C compiler is needed" in done.stderr
    assert not any((tmp_path / "canopy" / "compiled").iterdir())


@pytest.mark.long
def test_compiled_simulations_have_the_figures_of_python(tmp_path):
    made = run("-m", "canopy_lab.cli.main", "compile", home=tmp_path)
    assert made.returncode == 0, made.stderr
    (folder,) = (tmp_path / "canopy" / "compiled").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    worker = ROOT / "test" / "support" / "compiled_worker.py"
    rows = {}
    for how in ("compiled", "python"):
        switch = {} if how == "compiled" else {"CANOPY_COMPILED": "off"}
        done = run(worker, how, home=tmp_path, **switch)
        assert done.returncode == 0, done.stderr[-3000:]
        rows[how] = json.loads(done.stdout)
    assert rows["compiled"].keys() == rows["python"].keys()
    for name, row in rows["python"].items():
        assert rows["compiled"][name] == row, name
    assert len({json.dumps(row) for row in rows["python"].values()}) > 15  # they differ

    again = run("-m", "canopy_lab.cli.main", "compile", home=tmp_path)
    assert "compiled already" in again.stdout
    gone = run("-m", "canopy_lab.cli.main", "compile", "--remove", home=tmp_path)
    assert "deleted 1 compiled version" in gone.stdout
    assert not any((tmp_path / "canopy" / "compiled").iterdir())
