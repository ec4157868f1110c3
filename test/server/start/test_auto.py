"""``--radix-eviction auto`` sets every part that the user has not set and that the server can have."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_canopy.config import auto
from sglang_canopy.config.auto import WRITE_POLICY_FLAG
from sglang_canopy.config.server_options import AUTO_PARTS, AutoPart
from sglang_canopy.server.start import arguments, hooks
from sglang_canopy.telemetry.auto_line import LINE_INTERVAL_S, AutoLine, describe_auto
from support import forked

HOST_FLAGS = ("--enable-hierarchical-cache",)
FLAGS_BY_NAME = {
    "defaults": (),
    "order by hand": ("--schedule-policy", "lpm"),
    "gate": ("--canopy-session-gate", "auto"),
    "order off": ("--canopy-queue-order", "sglang"),
    "stages": ("--pp-size", "2"),
    "meter by hand": ("--canopy-whatif", "wa,floor=off"),
    "host": HOST_FLAGS,
    "host by hand": (*HOST_FLAGS, "--hicache-write-policy", "write_through"),
}
READ_SCRIPT = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
read = {}
for name, argv in json.loads(sys.argv[1]).items():
    a = prepare_server_args(argv)
    o = a._canopy_options
    read[name] = {
        "policy": a.radix_eviction_policy, "order": o.queue.queue_order,
        "gate": o.requests.session_gate, "floor": o.meter and o.meter.floor,
        "parts": {part.name: part.to_json() for part in o.auto} if o.auto is not None else None,
        "write": a.hicache_write_policy,
    }
print("READ" + json.dumps(read))
"""


def off_reasons(settings: dict) -> dict[str, str]:
    """Return why each inactive part of ``auto`` is inactive."""
    return {name: part["why"] for name, part in settings["parts"].items() if not part["active"]}


@pytest.fixture(scope="module")
def settings(tiny_model: Path):
    """Return the parsed settings of each command line, by its name."""
    common_flags = ["--model-path", str(tiny_model), "--device", "cpu"]
    common_flags += ["--radix-eviction"]
    command_lines = {name: [*common_flags, "auto", *flags] for name, flags in FLAGS_BY_NAME.items()}
    command_lines["wa"] = [*common_flags, "wa", *HOST_FLAGS]
    command = [sys.executable, "-c", READ_SCRIPT, json.dumps(command_lines)]
    process = forked.run(command, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.rpartition("READ")[2])


def test_every_part_is_on_and_the_policy_is_one_that_ranks(settings) -> None:
    defaults = settings["defaults"]
    assert (defaults["policy"], defaults["order"]) == ("wa", "bounded-shortest")
    assert (defaults["gate"], defaults["floor"]) == ("off", "on")
    assert off_reasons(defaults) == {"write policy": "there is no host tier"}
    assert off_reasons(settings["host"]) == {}
    assert list(defaults["parts"]) == list(AUTO_PARTS)


def test_user_settings_are_kept(settings) -> None:
    assert settings["order off"]["order"] == "sglang"
    assert settings["gate"]["gate"] == "auto"
    assert settings["meter by hand"]["floor"] == "off"
    assert settings["order by hand"]["order"] == "sglang"
    assert off_reasons(settings["order by hand"])["order"] == "--schedule-policy lpm was given"
    assert settings["order by hand"]["parts"]["order"]["change"] == "leave out --schedule-policy"
    assert off_reasons(settings["order off"])["order"] == "--canopy-queue-order sglang was given"
    assert off_reasons(settings["meter by hand"])["floor"] == "floor=off was given"
    assert off_reasons(settings["host by hand"])["write policy"].startswith(WRITE_POLICY_FLAG)


def test_unavailable_parts_are_omitted_with_the_reason(settings) -> None:
    assert settings["stages"]["order"] == "sglang"
    assert "--pp-size 2" in off_reasons(settings["stages"])["order"]
    assert settings["stages"]["parts"]["order"]["change"] == "use --pp-size 1"


def test_a_host_tier_is_exclusive_unless_the_user_sets_the_write_policy(settings) -> None:
    assert settings["host"]["write"] == "write_back"
    assert settings["host by hand"]["write"] == "write_through"
    assert settings["wa"] == {
        "policy": "wa",
        "order": "sglang",
        "gate": "off",
        "floor": None,
        "parts": None,
        "write": "write_through",
    }


def test_sglangs_config_file_may_set_auto(tmp_path: Path) -> None:
    """Arguments of the command line override the file, and nested values are JSON."""
    pytest.importorskip("sglang")
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "radix-eviction: auto\nenable-hierarchical-cache: true\npage-size: 64\n"
        "canopy-ttl:\n  residual_ttl_s: 60\n"
    )
    argv = arguments.expand_arguments(["--model-path", "m", "--config", str(plan)])[0][0]
    assert argv[-2:] == ["--hicache-write-policy", "write_back"]
    assert json.loads(argv[argv.index("--canopy-ttl") + 1]) == {"residual_ttl_s": 60}
    command_line = ["--config", str(plan), "--radix-eviction", "canopy-lru", "--page-size", "16"]
    argv = arguments.expand_arguments(command_line)[0][0]
    assert "write_back" not in argv
    assert auto.typed_value(argv, "--page-size") == "16"
    assert auto.typed_value(argv, "--radix-eviction-policy") == "canopy-lru"


def test_auto_is_refused_with_the_remedy_without_a_command_line(monkeypatch) -> None:
    monkeypatch.setattr(hooks, "check_in_place", lambda _: None)
    context = SimpleNamespace(params=SimpleNamespace(eviction_policy="auto"))
    with pytest.raises(SystemExit, match="give 'wa' here"):
        hooks._build_cache(None, context)


# ---- log lines ----

METER_STATUS = {
    "running": "canopy-lru",
    "hit_ratio": 0.4,
    "undecided": None,
    "arms": [
        {"policy": "canopy-lru", "capacity": "now", "hit_ratio": 0.4, "running": True},
        {
            "policy": "wa",
            "capacity": "now",
            "hit_ratio": 0.39,
            "standard_error": 0.004,
            "running": False,
        },
    ],
    "floor": {"policy": "wa", "behind": True, "falls": 1},
}
QUEUE_STATUS = {
    "order": "bounded-shortest",
    "waiting_requests": 7,
    "admitted": {"shortest": 30, "budget": 2},
}
GATE_STATUS = {"active": True, "thrash_share": 0.123, "waiting_sessions": 3, "paused_sessions": 2}
MISSED_STATUS = {"tokens": {"evicted": {"device": 50}}, "hits_with_memory": {"x2": 30, "x4": 45}}
TIER_STATUS = {"device": {"capacity_bytes": 8e9}}
STATUS = {
    "missed": MISSED_STATUS,
    "tiers": TIER_STATUS,
    "prompt_tokens": 1000,
    "running": "canopy-lru",
    "whatif": METER_STATUS,
    "queue": QUEUE_STATUS,
    "session_gate": GATE_STATUS,
    "agents": {"recognised": 5, "returns": 9},
}


def test_host_memory_is_advised_where_evicted_kv_is_recomputed() -> None:
    assert "host memory" not in describe_auto(STATUS, ()), "5 % of the prompts"
    line = describe_auto(STATUS | {"prompt_tokens": 100}, ())
    assert "50 % of the prompt tokens recompute evicted KV: 24 GB more host memory" in line
    assert "(--enable-hierarchical-cache --hicache-size) would hit 90 % of them" in line
    tiers = TIER_STATUS | {"host": {"capacity_bytes": 8e9}}
    few_missed = MISSED_STATUS | {"hits_with_memory": {"x2": 10, "x4": 20}}
    changes = {"prompt_tokens": 100, "tiers": tiers, "missed": few_missed}
    line = describe_auto(STATUS | changes, ())
    assert "48 GB more host memory would hit 40 % of them" in line


@pytest.mark.parametrize("gate_status", [None, GATE_STATUS])
def test_the_line_states_why_no_agents_are_recognised_while_kv_thrashes(gate_status) -> None:
    no_agents = STATUS | {"prompt_tokens": 100, "session_gate": gate_status}
    no_agents |= {"agents": {"recognised": 0, "returns": 0}}
    line = describe_auto(no_agents, ())
    assert "no agents recognised: no --tool-call-parser, no turn has returned" in line
    no_agents["agents"] = {"recognised": 0, "returns": 9}
    line = describe_auto(no_agents, (), "mistral")
    assert "mistral has found no call, none of 9 turns came within 20 s of an answer" in line
    # Little is recomputed.
    assert "no agents" not in describe_auto(no_agents | {"prompt_tokens": 1000}, ())
    assert "no agents" not in describe_auto(STATUS | {"prompt_tokens": 100}, ())


def test_the_log_has_the_line_once_a_minute_and_every_status_has_it(caplog) -> None:
    parts = [AutoPart("order", False, "off", "why", "leave it out").to_json()]
    auto_line, info_level = AutoLine(parts), caplog.at_level("INFO")
    with info_level:
        for second in range(2 * int(LINE_INTERVAL_S)):
            status = dict(STATUS)
            auto_line.add_to(status, 1000.0 + second)
            assert status["auto"].startswith("canopy-lru hits")
            assert status["auto_parts"] == parts
    assert len([record for record in caplog.records if "canopy auto:" in record.message]) == 2
