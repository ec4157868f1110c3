"""Plan files: written plans are read, and wrong keys are refused by name."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from sglang_canopy.config.plan_file import MAX_FILE_BYTES, ServerPlan, read_plan, write_plan
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.table import Group, TTLTable

PLAN = ServerPlan(
    radix_eviction="wa",
    radix_eviction_config={"model": "survival", "quantum_tokens": 64},
    host_eviction="canopy-lru",
    disk_eviction="etlru",
    host_bytes=1 << 30,
    disk_bytes=0,
    disk_path="/var/canopy",
    ttl=TTLTable((Group(7, 60.0, "docs"),), 5.0, categories={"api": 3600.0}),
    host_ttl=TTLTable(),
    made_by={"command": "canopy plan ttl", "groups": 1},
)


def test_a_plan_survives_a_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    assert read_plan(path) == PLAN
    write_plan(path, ServerPlan())
    assert read_plan(path) == ServerPlan()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_plan_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o666)
    write_plan(path, PLAN)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_plan_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    with pytest.raises(CanopyError, match="cannot write the plan file"):
        write_plan(tmp_path / "no" / "plan.json", PLAN)
    (tmp_path / "dir").mkdir()
    with pytest.raises(CanopyError, match="cannot write the plan file"):
        write_plan(tmp_path / "dir", PLAN)
    assert os.listdir(tmp_path) == ["dir"]


def test_roots_of_a_trace_are_refused_by_a_server_and_categories_are_not() -> None:
    PLAN.check_for_server()
    ServerPlan(ttl=TTLTable(hash="trace", categories={"api": 1.0})).check_for_server()
    with pytest.raises(CanopyError, match="server's own request log"):
        ServerPlan(ttl=TTLTable((Group(1, 1.0),), hash="trace")).check_for_server()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 2}, '"version" must be 1'),
        ({"version": True}, '"version" must be 1'),
        ({"ttll": {}}, "unknown key 'ttll'"),
        ({"radix_eviction": "lruu"}, "radix_eviction must be the name of a policy"),
        ({"infeasible": True}, "infeasible must be a text"),
        ({"radix_eviction": 3}, "radix_eviction must be the name of a policy"),
        ({"host_eviction": "tlru"}, "host_eviction must be the name of a policy"),
        ({"disk_eviction": "belady"}, "disk_eviction must be the name of a policy"),
        ({"disk_eviction_config": {"a": 1}}, "given without disk_eviction"),
        ({"radix_eviction_config": [1]}, "radix_eviction_config must be a JSON object"),
        ({"radix_eviction_config": {"a": {}}}, "radix_eviction_config: 'a'"),
        ({"host_bytes": -1}, "host_bytes must be a whole number"),
        ({"disk_bytes": 1.5}, "disk_bytes must be a whole number"),
        ({"disk_bytes": True}, "disk_bytes must be a whole number"),
        ({"disk_path": ""}, "disk_path must be"),
        ({"disk_path": "a\0b"}, "disk_path must be"),
        ({"ttl": 60}, "plan: ttl: TTL table must be"),
        ({"host_ttl": {"residual_ttl_s": -1}}, "plan: host_ttl: TTL table: residual_ttl_s"),
        ({"made_by": "me"}, "made_by must be a JSON object"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1, "radix_eviction": "wa", **change}))
    with pytest.raises(CanopyError) as caught:
        read_plan(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"version": 1, "disk_bytes": NaN}', "NaN is not a number"),
        ('{"version": 1, "disk_bytes": 1, "disk_bytes": 2}', "given twice"),
        ('{"version": 1, "made_by": {"x": 1e999}}', "finite"),
        ("[" * 100_000, "nested too deeply"),
        ("\xff", "must be a JSON object"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(CanopyError) as caught:
        read_plan(path)
    assert says in str(caught.value) or "cannot read" in str(caught.value)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(CanopyError, match="larger than"):
        read_plan(path)
    with pytest.raises(CanopyError, match="cannot read"):
        read_plan(tmp_path / "none.json")
