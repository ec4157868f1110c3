"""`scripts/live_tests.py`: a copy of the checkout in which another SGLang is pinned."""

import re
import subprocess
from pathlib import Path

import live_tests

WORKFLOWS = Path(__file__).resolve().parents[2] / ".github" / "workflows"


def small_checkout(root: Path) -> Path:
    for name, text in {
        "python/sglang_canopy/__init__.py": 'SGLANG_VERSION = "0.5.23"\n',
        "requirements/cpu-nodeps.txt": "sglang==0.5.23\ntriton==3.7.1\n",
        "test/test_one.py": "KNOWN = '0.5.23'\n",
        ".gitignore": ".venv\n",
        ".venv/big": "not copied",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def test_the_copy_names_the_other_release(tmp_path) -> None:
    root, into = small_checkout(tmp_path / "root"), tmp_path / "into"
    live_tests.copy_with("0.5.99", into, root)
    assert (into / live_tests.NAMED_IN[0]).read_text() == 'SGLANG_VERSION = "0.5.99"\n'
    assert (into / live_tests.NAMED_IN[1]).read_text() == "sglang==0.5.99\ntriton==3.7.1\n"
    assert (into / "test/test_one.py").read_text() == "KNOWN = '0.5.23'\n"
    assert not (into / ".venv").exists()
    assert (root / live_tests.NAMED_IN[0]).read_text() == 'SGLANG_VERSION = "0.5.23"\n'


def test_the_pinned_release_is_copied_as_it_is(tmp_path) -> None:
    root, into = small_checkout(tmp_path / "root"), tmp_path / "into"
    live_tests.copy_with(None, into, root)
    assert (into / live_tests.NAMED_IN[0]).read_text() == 'SGLANG_VERSION = "0.5.23"\n'


def test_every_light_test_and_place_of_the_version_is_there() -> None:
    assert all((live_tests.ROOT / name).exists() for name in live_tests.LIGHT)
    pinned = live_tests._pinned(live_tests.ROOT)
    assert all(pinned in (live_tests.ROOT / name).read_text() for name in live_tests.NAMED_IN)


def test_the_workflow_runs_scripts_that_exist() -> None:
    text = (WORKFLOWS / "follow-sglang.yml").read_text()
    named = set(re.findall(r"scripts/\w+\.\w+", text))
    assert named == {"scripts/follow_sglang.py", "scripts/live_tests.py"}
    assert "schedule:" in text
    assert all((WORKFLOWS.parents[1] / name).exists() for name in named)
