"""A developer is told which functions differ from those that Canopy was written against."""

import logging
import shutil
from pathlib import Path

import pytest
import sglang

import digests
import sglang_digests

CORE = "srt/mem_cache/unified_cache/unified_tree_core.py"
SPLIT = "sglang.srt.mem_cache.unified_cache.unified_tree_core.UnifiedTreeCore._split_node"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of SGLang's files that the table names."""
    for file in digests.read_table():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(sglang.__path__[0]) / file, tmp_path / file)
    return tmp_path


def edit(root: Path, old: str, new: str) -> None:
    text = (root / CORE).read_text()
    assert text.count(old) >= 1, old
    (root / CORE).write_text(text.replace(old, new))


@pytest.mark.long
def test_the_table_equals_the_scripts_output_for_the_pinned_sglang() -> None:
    assert digests.read_table() == sglang_digests.make_table(), (
        "run python scripts/sglang_digests.py"
    )


def test_every_method_that_a_class_of_ours_overrides_is_in_the_table() -> None:
    table = digests.read_table()
    classes = {ours.__name__ for ours in sglang_digests.classes_on_sglang()}
    assert {"CanopyTreeCore", "CanopyFullComponent", "CanopyRadixCache"} <= classes
    assert {"CanopyStorage", "CanopyMooncakeStore", "NewTokensAttnBackend"} <= classes
    places = [sglang_digests.place_of(value) for value in sglang_digests.overridden()]
    assert len([place for place in places if place is not None]) > 30
    for place in places:
        if place is not None:
            assert place[1] in table[place[0]]["names"], place


def test_every_hooked_function_and_all_we_rely_on_is_in_the_table() -> None:
    table = digests.read_table()
    for value in sglang_digests.named():
        file, name = sglang_digests.place_of(value) or ("", "")
        assert name in table[file]["names"], (file, name)


def test_an_unchanged_sglang_passes(root: Path) -> None:
    assert digests.changed(root, digests.read_table()) == []


def test_a_renamed_private_method_is_named(root: Path) -> None:
    edit(root, "def _split_node(", "def _split_the_node(")
    assert digests.changed(root, digests.read_table()) == [SPLIT]


def test_a_private_method_with_another_body_is_named(root: Path) -> None:
    edit(root, "    def _split_node(", "    def _unused(self): pass\n\n    def _split_node(")
    assert digests.changed(root, digests.read_table()) == []
    source = (root / CORE).read_text()
    start = source.index("def _split_node(")
    body = source.index("\n        ", source.index("->", start))
    (root / CORE).write_text(source[:body] + "\n        self.changed = True" + source[body:])
    assert digests.changed(root, digests.read_table()) == [SPLIT]


def test_comments_and_formatting_do_not_matter(root: Path) -> None:
    edit(root, "    def _split_node(", "    # patched by nobody\n\n    def _split_node(")
    assert digests.changed(root, digests.read_table()) == []


def test_a_missing_file_counts_as_changed(root: Path) -> None:
    (root / CORE).unlink()
    assert SPLIT in digests.changed(root, digests.read_table())


def test_a_file_without_its_source_is_not_compared_and_that_is_logged(root: Path, caplog) -> None:
    (root / CORE).rename((root / CORE).with_suffix(".pyc"))
    with caplog.at_level(logging.WARNING):
        assert digests.changed(root, digests.read_table()) == []
    assert CORE in caplog.text
