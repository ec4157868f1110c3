"""`scripts/follow_sglang.py`: differences of another SGLang release, from its wheel only."""

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import sglang

import digests
import follow_sglang
import overlay
import sglang_digests
from sglang_canopy import releases

CORE = "srt/mem_cache/unified_cache/unified_tree_core.py"
DELETED_FILE = "srt/mem_cache/radix_cache.py"
CORE_EDITS = {
    "new_node.hit_count = child.hit_count": "new_node.hit_count = 0",
    "def reset(self)": "def reset(self, limit=0)",
    "def _unevict_node_on_insert(": "def _restore_node(",
}


def write_wheel(folder: Path, edit: Callable[[str], str], deleted_file: str = "") -> Path:
    """Write a wheel of the installed SGLang's files that the table names, with ``edit`` applied to one."""
    path = folder / "sglang-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in digests.read_table():
            text = (Path(sglang.__path__[0]) / file).read_text(encoding="utf-8")
            if file != deleted_file:
                archive.writestr(f"sglang/{file}", edit(text) if file == CORE else text)
    return path


def run_command(capsys, *argv: str) -> tuple[int, str]:
    status = follow_sglang.main(argv)
    return status, "".join(capsys.readouterr())


def test_an_equal_release_has_no_changes(tmp_path, capsys) -> None:
    equal_wheel = write_wheel(tmp_path, lambda text: text + "\n# a comment\n")
    status, printed = run_command(capsys, "--wheel", str(equal_wheel), "--list")
    assert status == 0
    assert re.fullmatch(r"sglang 9\.9\.9, pinned \S+: none of \d+ functions moved\n", printed)


def test_a_file_depends_on_a_method_if_it_names_the_class() -> None:
    """Many files call something ``forward``."""
    assert follow_sglang._files_naming("FullComponent.drive_host_eviction") == ["radix/cache.py"]


def test_every_kind_of_change_is_named_in_one_line_and_in_the_table(tmp_path, capsys) -> None:
    def edit(text: str) -> str:
        for old, new in CORE_EDITS.items():
            assert old in text
            text = text.replace(old, new)
        return text

    wheel = write_wheel(tmp_path, edit, deleted_file=DELETED_FILE)
    with zipfile.ZipFile(wheel, "a") as archive:
        text = "class Model:\n    dtype: A[str, 'known'] = 'auto'\n    new_scale: A[int, ''] = 1\n"
        archive.writestr(f"{follow_sglang.ARGUMENT_FOLDER}model.py", text)
    status, printed = run_command(capsys, "--wheel", str(wheel), "--list")
    assert status == 1
    line, _, table = printed.partition("\n")
    assert line.endswith("arguments to review: new_scale")
    assert re.search(r": 2 of \d+ functions changed and \d+ are gone, in 2 files: ", line)
    assert re.search(rf"changed +to read +UnifiedTreeCore\._split_node +{CORE} +.*core.py", table)
    assert re.search(r"changed +signature +UnifiedTreeCore\.reset", table)
    assert re.search(rf"gone +signature +UnifiedTreeCore\._unevict_node_on_insert +{CORE} ", table)
    gone_rows = re.findall(rf"^ *gone +signature +\S+ +{DELETED_FILE} ", table, re.M)
    assert len(gone_rows) == len(digests.read_table()[DELETED_FILE]["names"])


def test_tests_run_against_the_release_instead_of_the_installed_one(tmp_path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    test_file = tmp_path / "test_it.py"
    function = f"def test_it():\n    assert {str(tmp_path)!r} in sglang.__file__\n"
    test_file.write_text(f"import sglang\n\n{function}")
    assert overlay.run_tests(tmp_path, ["-n0", "-p", "no:cacheprovider", str(test_file)]) == 0


def test_every_test_for_releases_exists_and_a_workflow_runs_them() -> None:
    assert all((overlay.ROOT / name).exists() for name in overlay.RELEASE_TESTS)
    text = (overlay.ROOT / ".github" / "workflows" / "follow-sglang.yml").read_text()
    assert "schedule:" in text
    assert "scripts/follow_sglang.py --try" in text
    assert f"./scripts/test.sh --sglang {releases.TESTED_RELEASES[0]}" in text


@pytest.mark.long
def test_the_table_equals_the_scripts_output_for_the_pinned_sglang() -> None:
    assert digests.read_table() == sglang_digests.make_table(), "run scripts/sglang_digests.py"


def test_every_method_that_a_class_of_ours_overrides_is_in_the_table() -> None:
    table = digests.read_table()
    classes = {cls.__name__ for cls in sglang_digests.classes_on_sglang()}
    assert {"CanopyTreeCore", "CanopyFullComponent", "CanopyRadixCache"} <= classes
    assert {"CanopyStorage", "CanopyMooncakeStore", "NewTokensAttnBackend"} <= classes
    places = [*filter(None, map(sglang_digests.place_of, sglang_digests.overridden_functions()))]
    assert len(places) > 30
    for file, name in places:
        if not sglang_digests.EXTENSION_POINTS.fullmatch(name):
            assert name in table[file]["names"], (file, name)


def test_every_hooked_function_is_in_the_table() -> None:
    table, checked = digests.read_table(), 0
    for function in sglang_digests.hook_functions():
        file, name = sglang_digests.place_of(function) or ("", "")
        if file and not sglang_digests._is_offered(function, name):
            checked += 1
            assert name in table[file]["names"], (file, name)
    assert checked > 0
