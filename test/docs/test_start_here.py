"""Every command of "Start here" is run, on a real server if it needs one."""

import json
import re
import shlex

import pytest

import journey
from canopy_lab.cli.main import main
from journey import POOL_TOKENS, SERVE, START, SWITCH, SWITCH_BACK, on_this_log
from support.logs import agents


def test_these_are_the_commands_of_the_page() -> None:
    assert journey.commands() == [
        "canopy advise LOG",
        "canopy advise LOG --start sglang serve MODEL",
        "canopy doctor sglang serve MODEL --canopy-plan advice.plan.json",
        "sglang serve MODEL --canopy-plan advice.plan.json --canopy-whatif auto,floor=off",
        "canopy top page",
        "canopy trial --policy wa",
        "sglang serve MODEL --radix-eviction auto",
        "curl http://127.0.0.1:30000/canopy/policy -H 'Content-Type: application/json' "
        """-d '{"device": "canopy-lru"}'""",
        "sglang serve MODEL --radix-eviction lru",
    ]


def test_a_log_becomes_a_server_that_can_be_tried(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("sglang")
    from sglang_canopy.doctor import command_line
    from sglang_canopy.doctor.launch import launch_of

    monkeypatch.chdir(tmp_path)
    log, ran = agents(tmp_path / "agents.jsonl"), []
    monkeypatch.setattr("canopy_lab.cli.advise.os.execvp", lambda *a: ran.append(a[1]))
    main(on_this_log(START, log, "--capacity-tokens", str(POOL_TOKENS), "--jobs", "1"))
    said = capsys.readouterr().out
    assert ran == [shlex.split(SERVE)]
    assert "Use auto (wa ranks)" in said
    assert (tmp_path / "advice.html").exists()
    for line in (SERVE, SWITCH, SWITCH_BACK):
        given = command_line.parse(launch_of(shlex.split(line)).arguments)
        assert not command_line.refused(given), line


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_journey_on_a_real_server(tiny_model, tmp_path) -> None:
    """Advice starts the server; doctor passes it; meter, trial, page and the way back answer."""
    log = agents(tmp_path / "agents.jsonl")
    walked = journey.walk(tiny_model, log, tmp_path, slice_s=2, pictures=None)
    said = walked.outputs
    assert "Use auto (wa ranks)" in said["advise"]
    assert "refused" not in said["doctor"].lower() or "nothing is refused" in said["doctor"].lower()
    assert re.search("^(pair 6|Nothing to try)", said["trial"], re.M), said["trial"]
    assert said["look"].startswith("http://127.0.0.1:")
    assert re.search("Keep |would save", said["top"])
    assert json.loads(said["back"]) == {"device": "canopy-lru", "replicas": 1}
