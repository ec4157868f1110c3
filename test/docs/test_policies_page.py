"""The table of policies is complete, and the walkthrough that adds one works as printed."""

import re
import sys
import types
from pathlib import Path

import pytest

from canopy_lab.sim import hindsight
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy import registry

ROOT = Path(__file__).resolve().parents[2]
PAGE_TEXT = (ROOT / "docs" / "reference" / "policies.md").read_text()
WALKTHROUGH = (ROOT / "docs" / "guide" / "add-a-policy.md").read_text()


def policy_rows():
    """Return the cells of each row of the main table, by the policy's name."""
    rows = {}
    for line in PAGE_TEXT.split("## Options of the tree")[0].splitlines():
        match = re.match(r"\| `([\w-]+)` \| (?:`([\w-]+)`|simulator only) \|", line)
        if match:
            rows[match[1]] = [cell.strip() for cell in line.strip("|").split("|")]
    return rows


def test_every_name_is_in_the_table_and_no_other():
    names = {*registry.policy_names(), *hindsight.hindsight_names()}
    assert set(policy_rows()) == names, "give each policy a row in docs/reference/policies.md"


def test_live_names_are_the_registrys():
    live_names = {cells[1].strip("`") for cells in policy_rows().values()} - {"simulator only"}
    assert live_names == set(registry.live_names()), "give each a row in docs/reference/policies.md"


@pytest.fixture
def walkthrough(monkeypatch):
    """Register the page's policy as the page describes; return its test code."""
    text = WALKTHROUGH.split("<!-- adding-a-policy", 1)[1].split("<!-- end: adding-a-policy", 1)[0]
    policy_code, test_code = re.findall(r"```python\n(.*?)```", text, re.S)
    module = types.ModuleType("sglang_canopy.policy.mru")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(policy_code, "docs/guide/add-a-policy.md", "exec"), module.__dict__)
    monkeypatch.setitem(registry._MODULE_BY_CLASS, "mru", module.__name__)
    return test_code


def test_the_walkthroughs_policy_passes_its_tests(walkthrough):
    namespace = {}
    exec(compile(walkthrough, "docs/guide/add-a-policy.md", "exec"), namespace)
    tests = [name for name in namespace if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        namespace[name]()


def test_the_walkthroughs_options_are_checked(walkthrough):
    with pytest.raises(CanopyError, match="spare_hits"):
        registry.make_policy("mru", {"spare_hits": -1})
