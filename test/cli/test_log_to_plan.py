"""Logs of other programs, all the way: advice, a plan, and a server's own check of it."""

import json

import pytest

from canopy_lab.cli.main import main
from canopy_lab.plan.server_plan import read_config
from support.logs import SESSIONS, TURNS, WRITERS

POOL = "6000"
"""Tokens: less than the open sessions have."""
PLAN = (
    "--device-tokens", POOL, "--disks", "none", "--server", "page_size=64", "--ttl", "none",
    "--search", "dram_levels=1,checks=off", "--jobs", "1",
)  # fmt: skip


@pytest.mark.parametrize(
    "program",
    [
        "litellm",
        *(pytest.param(name, marks=pytest.mark.long) for name in WRITERS if name != "litellm"),
    ],
)
def test_a_log_becomes_advice_a_plan_and_a_start_that_is_not_refused(
    program, tmp_path, monkeypatch, capsys
):
    pytest.importorskip("sglang")
    from sglang_canopy.doctor import command_line

    monkeypatch.chdir(tmp_path)
    log = str(WRITERS[program](tmp_path / "requests.log"))
    asked = ["--capacity-tokens", POOL, "--json-out", "advice.json", "--jobs", "1"]
    assert main(["advise", log, *asked]) == 0
    advice = json.loads((tmp_path / "advice.json").read_text())
    assert advice["sample"]["requests"] == 2 * SESSIONS * TURNS
    assert advice["decision"]["flag"] == "auto"
    assert main(["plan", log, *PLAN, "--out", "plan.yaml"]) == 0
    assert "Policy: auto, as canopy advise finds" in capsys.readouterr().out
    assert read_config("plan.yaml")["radix-eviction"] == "auto"
    given = command_line.parse(["--model-path", "/none", "--config", "plan.yaml"])
    assert given.radix_eviction_policy == "auto"
    assert not command_line.refused(given)
