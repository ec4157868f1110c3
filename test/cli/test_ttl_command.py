"""``canopy plan ttl`` as a user runs it."""

import json
import stat
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from canopy_lab.cli.main import main
from canopy_lab.plan.server_plan import read_config
from sglang_canopy.config.tiers import TierFlags
from sglang_canopy.declared import typed_values
from sglang_canopy.radix.live_request import LiveRequest, extend_path
from sglang_canopy.tenant import tenant_namespace

xxhash = pytest.importorskip("xxhash")
SYSTEM = list(range(128))
"""Two blocks of 64 tokens that every second request begins with."""


def event(event_name: str, rid: str, time_s: float, **fields: Any) -> str:
    minute, second = divmod(time_s, 60)
    hour, minute = divmod(minute, 60)
    stamp = f"2026-01-02T{int(hour):02d}:{int(minute):02d}:{second:09.6f}"
    return json.dumps({"timestamp": stamp, "event": f"request.{event_name}", "rid": rid, **fields})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A server's log: a tenant with a long prompt that repeats every 40 s, among others that never do."""
    lines = []
    for i in range(200):
        new_ids = [1000 + 200 * i + token for token in range(192)]
        ids = [*SYSTEM, *new_ids[:64]] if i % 4 == 0 else new_ids
        salt = "acme" if i % 4 == 0 else None
        obj = {"input_ids": ids, "sampling_params": {}, "cache_salt": salt}
        meta_info = {"completion_tokens": 4, "finish_reason": {"type": "stop"}}
        lines.append(event("received", str(i), 10.0 * i, obj={}))
        lines.append(event("finished", str(i), 10.0 * i + 1, obj=obj, out={"meta_info": meta_info}))
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines))
    return path


def server_ids(tokens: list[int], salt: str) -> list[int]:
    """Return the block ids of ``radix/live_request.py``, computed by other code."""
    digest, ids = xxhash.xxh3_64_intdigest(tenant_namespace(None, salt)), []
    for i in range(0, len(tokens) - 63, 64):
        digest = xxhash.xxh3_64_intdigest(array("q", tokens[i : i + 64]).tobytes(), seed=digest)
        ids.append(digest)
    return ids


def test_server_ids_are_those_of_a_live_request() -> None:
    request = LiveRequest(time=0.0, block_tokens=64)
    request.path = []
    request.path_hash = xxhash.xxh3_64_intdigest(tenant_namespace(None, "acme"))
    extend_path(request, SYSTEM)
    assert list(request.path) == server_ids(SYSTEM, "acme")


def test_a_plan_from_a_servers_log_names_the_servers_own_subtrees(log, tmp_path, capsys):
    out = tmp_path / "plan.yaml"
    args = ["plan", "ttl", str(log), "--format", "sglang", "--budget-gb", "0.08", "--out", str(out)]
    assert main(args) == 0
    config = read_config(out)
    assert list(config) == ["canopy-ttl"]
    options = typed_values(TierFlags, SimpleNamespace(canopy_ttl=json.dumps(config["canopy-ttl"])))
    table = options["ttl"]
    path = server_ids(SYSTEM, "acme")
    assert [group.root for group in table.groups] == [path[0]]
    assert table.ttl_s(table.group_of(path)) >= 40.0 > table.residual_ttl_s
    assert table.group_of(server_ids(SYSTEM, "other")) == -1
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    printed = capsys.readouterr().out
    assert f"{path[0]:#x}" in printed
    assert "residual" in printed
