"""docs/policies.md: its table is complete, and its walkthrough works as printed."""

import dataclasses
import importlib
import re
import sys
import types
from pathlib import Path

import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy import registry
from sglang_canopy.sim import hindsight

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "policies.md").read_text()


def table():
    """The main table as {name: cells}."""
    rows = {}
    for line in PAGE.splitlines():
        match = re.match(r"\| `([\w-]+)` \| (?:`([\w-]+)`|simulator only) \|", line)
        if match:
            rows[match[1]] = [cell.strip() for cell in line.strip("|").split("|")]
    return rows


def config_of(name):
    package = (
        "sglang_canopy.sim.hindsight"
        if name in hindsight.hindsight_names()
        else ("sglang_canopy.policy")
    )
    return importlib.import_module(f"{package}.{name.replace('-', '_')}").POLICY.Config


def test_every_name_is_in_the_table_and_no_other():
    assert set(table()) == {*registry.policy_names(), *hindsight.hindsight_names()}


def test_live_names_are_the_registrys():
    live = {c[1].strip("`") for name, c in table().items() if c[1] != "simulator only"}
    assert live == set(registry.live_names())


@pytest.mark.parametrize("name", sorted(table()))
def test_options_are_the_policys_own(name):
    cell = table()[name][3]
    listed = set(re.findall(r"`(\w+)`", cell))
    for other in re.findall(r"those of `([\w-]+)`", cell):
        listed |= set(re.findall(r"`(\w+)`", table()[other][3]))
        listed.discard(other)
    assert listed == {f.name for f in dataclasses.fields(config_of(name))}


@pytest.fixture
def walkthrough(monkeypatch):
    """The page's policy, registered as the page says; returns its test code."""
    section = PAGE.split("<!-- adding-a-policy", 1)[1].split("<!-- end: adding-a-policy", 1)[0]
    policy, tests = re.findall(r"```python\n(.*?)```", section, re.S)
    module = types.ModuleType("sglang_canopy.policy.mru")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(policy, "docs/policies.md", "exec"), module.__dict__)
    monkeypatch.setitem(registry._MODULES, "mru", "mru")
    monkeypatch.syspath_prepend(ROOT / "test" / "policy")
    return tests


def test_the_walkthroughs_policy_passes_its_tests(walkthrough):
    space = {}
    exec(compile(walkthrough, "docs/policies.md", "exec"), space)
    tests = [name for name in space if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        space[name]()


def test_the_walkthroughs_options_are_checked(walkthrough):
    with pytest.raises(CanopyError, match="spare_hits"):
        registry.make_policy("mru", {"spare_hits": -1})
