"""A developer is told which functions differ from those that Canopy was written against."""

import pytest

import digests
import sglang_digests


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
    places = [sglang_digests.place_of(value) for value, _ in sglang_digests.overridden()]
    assert len([place for place in places if place is not None]) > 30
    for place in places:
        if place is not None and not sglang_digests.EXTENSION_POINTS.fullmatch(place[1]):
            assert place[1] in table[place[0]]["names"], place


def test_every_hooked_function_is_in_the_table() -> None:
    table = digests.read_table()
    for value, _ in sglang_digests.named():
        file, name = sglang_digests.place_of(value) or ("", "")
        if file and not sglang_digests._is_offered(value, name):
            assert name in table[file]["names"], (file, name)
