"""The table of set-ups against the refusals and the tests that it names."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_canopy.config.refusals import REFUSALS
from sglang_canopy.doctor.setups import (
    CACHE,
    PARTS,
    REFUSED,
    SERVED,
    SETUPS,
    UNTESTED,
    refused,
    untested,
)

TESTS = Path(__file__).resolve().parents[1]
CELLS = [(setup, part) for setup in SETUPS for part in PARTS]
EACH = pytest.mark.parametrize(("setup", "part"), CELLS, ids=lambda one: getattr(one, "name", one))


@cache
def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@EACH
def test_a_cell_names_a_test_that_exists_or_says_why_there_is_none(setup, part) -> None:
    cell = setup.cell(part)
    if cell.state in (REFUSED, UNTESTED):
        assert cell.test is None
        assert cell.why
        return
    file, name = cell.test.split("::")
    assert name in functions_of(TESTS / file), cell.test
    assert cell.state == (SERVED if file.startswith("e2e/") else CACHE)


@EACH
def test_what_is_refused_in_the_table_is_refused_at_the_start(setup, part) -> None:
    given = SimpleNamespace(**{setup.option: setup.value})
    why = refused(part, given)
    assert (setup.cell(part).state == REFUSED) == (why is not None)
    if why is not None:
        assert getattr(setup, part) is None, "refused, and yet a test is named"


def test_every_refusal_of_policies_and_documents_is_in_the_table() -> None:
    options = {
        one.option for one in REFUSALS if one.option and (one.policies or one.chunks or one.disk)
    }
    assert options <= {setup.option for setup in SETUPS}


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_a_sample_is_its_own_set_up(setup) -> None:
    assert setup.applies(setup.value)


def test_names_are_there_once() -> None:
    names = [setup.name for setup in SETUPS]
    assert len(set(names)) == len(names)


def test_what_a_server_uses_untried_is_found() -> None:
    server = SimpleNamespace(device="cuda", tp_size=2, page_size=16)
    (found, parts), *more = untested(server, ("device", "host"))
    assert (found.name, parts, more) == ("CUDA", ["device", "host"], [])
