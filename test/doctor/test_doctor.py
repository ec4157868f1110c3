"""`canopy doctor`: it reads a server's flags as the server does, and prints no secret."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy import SGLANG_VERSION, releases
from sglang_canopy.config.refusals import all_unsupported, unsupported
from sglang_canopy.config.setups import POLICIES, SETUPS
from sglang_canopy.doctor import examine, machine
from sglang_canopy.doctor.command_line import HIDDEN, arguments_of, masked
from sglang_canopy.doctor.examine import Report
from sglang_canopy.doctor.machine import FAULT, NOTE, REFUSED, UNTESTED, Finding
from sglang_canopy.errors import CanopyError
from sglang_canopy.storage.settings import DYNAMIC_BACKEND
from support import forked

LABEL = "ANSWER"
"""Stands before the answer, since imports may print too."""
_DOCTOR = """
import contextlib, io, json, sys
from canopy_lab.cli.main import main
found = {}
for name, words in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["doctor", "--json", *words])
    found[name] = {"code": status, "stderr": err.getvalue(), **json.loads(out.getvalue() or "{}")}
print("ANSWER" + json.dumps(found))
"""


def reports_on(words: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the doctor's report on each command line, with its exit status and error output."""
    done = forked.run([sys.executable, "-c", _DOCTOR, json.dumps(words)], timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.rpartition(LABEL)[2])
    return found


BASE = "--model-path /none --device cpu --port {port} "
LINES = {
    "plain": BASE + "--radix-eviction wa",
    "sglangs own": BASE + "--radix-eviction lru --enable-lmcache --tp-size 4",
    "two refused": BASE + "--radix-eviction wa --enable-lmcache --use-ray",
    "untested": BASE + "--radix-eviction wa --tp-size 4 --enable-hierarchical-cache",
    "no such plan": BASE + "--radix-eviction wa --config /no/such/plan.yaml",
    "short flags": "sglang serve /none --device cpu --port {port} --radix-eviction wa --tp 8 --dp 8 "
    "--api-k opensesame",
    "no device": "sglang serve /none --port {port} --radix-eviction wa",
    "unknown flag": BASE + "--no-such-flag",
    "bad number": BASE + "--tp-size two",
    "disk": "sglang serve /none --device cpu --port {port} --radix-eviction wa "
    "--enable-hierarchical-cache --hicache-storage-backend canopy "
    "--hicache-storage-prefetch-policy best_effort "
    """--hicache-storage-backend-extra-config '{{"path": "{folder}"}}' --api-key opensesame""",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict:
    """Every line of ``LINES``, examined in a process of its own: SGLang is hooked there."""
    blocked = tmp_path_factory.mktemp("doctor") / "file"
    blocked.write_text("not a folder")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    words = {
        name: shlex.split(line.format(port=free, folder=blocked / "disk"))
        for name, line in LINES.items()
    }
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        words["busy port"] = [*shlex.split(LINES["plain"].format(port=port))]
        return reports_on(words)


def of_kind(report: dict, kind: str) -> list[str]:
    return [one["text"] for one in report["findings"] if one["kind"] == kind]


UNTRIED = {
    "plain": [],
    "sglangs own": None,
    "untested": ["`--tp-size` above 2: device, host"],
    "no device": ["CUDA: device"],  # the default of SGLang
    "short flags": None,
}
"""Lines that start, and the set-ups of each that no test has; ``None``: not compared."""


@pytest.mark.parametrize("line", UNTRIED)
def test_a_server_that_starts_has_its_untested_set_ups_named(reports, line) -> None:
    assert reports[line]["code"] == 0
    assert not of_kind(reports[line], REFUSED)
    assert UNTRIED[line] in (None, of_kind(reports[line], UNTESTED))


def test_all_refusals_are_reported_at_once_with_remedies(reports) -> None:
    refusals = of_kind(reports["two refused"], REFUSED)
    assert reports["two refused"]["code"] == 1
    assert [any(name in one for one in refusals) for name in ("lmcache", "--use-ray")] == [True] * 2
    assert all("--radix-eviction lru" in one for one in refusals)
    assert len(refusals) == 2, "the start's own sentence is one of them"


def test_a_prefetch_that_waits_for_nothing_is_noted(reports) -> None:
    (note,) = [t for t in of_kind(reports["disk"], NOTE) if "best_effort" in t]
    assert "timeout" in note
    assert not [t for t in of_kind(reports["plain"], NOTE) if "best_effort" in t]


def test_flags_are_shortened_as_sglang_allows(reports) -> None:
    untried = of_kind(reports["short flags"], UNTESTED)
    assert "`--tp-size` above 2: device" in untried
    assert "opensesame" not in json.dumps(reports["short flags"])


@pytest.mark.parametrize(
    ("line", "part"),
    [("unknown flag", "--no-such-flag"), ("bad number", "two"), ("no such plan", "plan.yaml")],
)
def test_a_command_line_that_cannot_be_read_is_a_mistake(reports, line, part) -> None:
    assert reports[line]["code"] == 2
    assert part in reports[line]["stderr"]
    assert "Traceback" not in reports[line]["stderr"]


def test_a_used_port_and_a_missing_folder_are_faults(reports) -> None:
    (port,) = of_kind(reports["busy port"], FAULT)
    assert "cannot be used" in port
    (folder,) = of_kind(reports["disk"], FAULT)
    assert "is not a folder" in folder
    assert reports["busy port"]["code"] == reports["disk"]["code"] == 1


def test_a_whole_launch_command_is_read_and_its_key_is_hidden(reports) -> None:
    assert reports["disk"]["flags"].startswith("--model-path /none ")
    assert "opensesame" not in json.dumps(reports)


def test_the_environment_is_in_every_report(reports) -> None:
    names = {"canopy", "python", "torch", "sglang", "torch build", "compiler", "open files"}
    assert names <= reports["plain"]["environment"].keys()


# ---- without a server's parser ----


def test_every_refusal_that_applies_is_listed_and_the_first_is_the_servers() -> None:
    every = [one for one in SETUPS if one.policies and one.option and one.applies(True)]
    args = SimpleNamespace(**{one.option: True for one in every})
    found = list(all_unsupported(POLICIES, args, environment={}))
    assert len(found) == len(every)
    assert found[0] == unsupported(POLICIES, args, environment={})


@pytest.mark.parametrize(
    "words",
    [
        ["sglang", "serve", "M", "--x"],
        ["python", "-m", "sglang.launch_server", "--model-path", "M", "--x"],
        ["M", "--x"],
        ["--model-path", "M", "--x"],
    ],
)
def test_a_launch_command_may_be_pasted_as_it_is(words) -> None:
    assert arguments_of(words) == ["--model-path", "M", "--x"]


def test_a_command_of_something_else_is_refused() -> None:
    with pytest.raises(CanopyError, match="sglang serve MODEL"):
        arguments_of(["docker", "run", "image"])


@given(st.text(min_size=4, alphabet="QXZ987"), st.booleans())
def test_no_key_is_ever_shown(secret, joined) -> None:
    words: list[str] = []
    for flag in ("--api-key", "--admin-api-key", "--ssl-key-password"):
        words += [f"{flag}={secret}"] if joined else [flag, secret]
    words += ["--extra", json.dumps({"a": [{"access_token": secret}], "quota_bytes": {secret: 1}})]
    words += ["--canopy-disk", f'tenant_quota_gb={{"{secret}": 1, "*": 2}}']
    words += ["--url", f"http://me:{secret}@host/", "--broken", "{" + secret]
    shown = " ".join(masked(words))
    assert secret not in shown
    assert HIDDEN in shown


def test_a_switch_after_a_key_is_not_its_value() -> None:
    assert masked(["--api-key", "--port", "3"]) == ["--api-key", "--port", "3"]


def distribution(version: str, place: str) -> SimpleNamespace:
    return SimpleNamespace(
        version=version, metadata={"Name": "sglang"}, locate_file=lambda _: Path(place)
    )


@pytest.mark.parametrize(
    ("installed", "kind", "text"),
    [
        ([], FAULT, "not installed"),
        ([("0.0.1", "/a")], NOTE, SGLANG_VERSION),
        ([(SGLANG_VERSION, "/a"), (SGLANG_VERSION, "/b")], FAULT, "two sglangs"),
        *(([(one, "/a"), (one, "/a")], None, "") for one in releases.TESTED),
    ],
)
def test_no_sglang_another_one_and_two_of_them(installed, kind, text) -> None:
    found = machine.check_packages([distribution(*one) for one in installed])
    assert [one.kind for one in found] == ([kind] if kind else [])
    assert all(text in one.text for one in found)


def test_a_machine_without_a_compiler(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = machine.check_tools({})
    assert FAULT in [one.kind for one in found]
    assert "gcc" in found[0].text


def test_folders(tmp_path) -> None:
    tmp_path.chmod(0o700)
    assert machine.check_folder("it", tmp_path / "not" / "there" / "yet") == []
    assert machine.check_folder("it", tmp_path) == []
    (note,) = machine.check_folder("it", tmp_path, 10**18)
    assert note.kind == NOTE
    tmp_path.chmod(0o755)
    (note,) = machine.check_folder("it", tmp_path)
    assert "chmod 700" in note.text


def test_a_host_tier_that_memory_has_no_room_for(monkeypatch) -> None:
    from sglang.srt.mem_cache import host_memory
    from sglang.srt.mem_cache.pool_host import base

    available = 24 * 2**30
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 10 * 2**30)
    monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda **_: available)
    assert machine.check_host_memory(0) == machine.check_host_memory(13e9) == []
    (fault,) = machine.check_host_memory(16e9)
    assert fault.kind == FAULT
    assert "16.0 GB" in fault.text
    available = 9 * 2**30
    (fault,) = machine.check_host_memory(0)
    assert "none is left" in fault.text


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        ({"tp_size": 4, "pp_size": 2, "nnodes": 2}, 4),
        ({"tp_size": 2, "dp_size": 2}, 4),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 2),
    ],
)
def test_room_is_for_every_rank_on_the_machine(monkeypatch, ranks, count) -> None:
    one = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1, "enable_dp_attention": False}
    extra = json.dumps({**DYNAMIC_BACKEND, "path": "/d", "capacity_bytes": 10**9})
    tiers = {"canopy_host_gb": 1.0, "hicache_size": 0, "enable_hierarchical_cache": True}
    args = {
        "hicache_storage_backend_extra_config": extra,
        "device": "cuda",
        **tiers,
        **one,
        **ranks,
    }
    rooms = []
    monkeypatch.setattr(machine, "check_port", lambda *_: [])
    monkeypatch.setattr(machine, "check_host_memory", lambda room: rooms.append(room) or [])
    monkeypatch.setattr(machine, "check_folder", lambda *given: rooms.append(given[-1]) or [])
    monkeypatch.setattr(examine.command_line, "used_parts", lambda _args: {"disk"})
    assert examine._places(SimpleNamespace(host="", port=1, **args)) == []
    assert rooms == [count * 10**9] * 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path) -> None:
    tmp_path.chmod(0o500)
    (fault,) = machine.check_folder("it", tmp_path / "disk")
    assert fault.kind == FAULT


@pytest.mark.parametrize("number", [-1, 70_000])
def test_a_port_that_is_none(number) -> None:
    (fault,) = machine.check_port("127.0.0.1", number)
    assert str(number) in fault.text


@pytest.mark.parametrize("kind", [REFUSED, FAULT, UNTESTED, NOTE])
def test_the_status_and_the_text(kind) -> None:
    report = Report("--x", {"python": "3"}, [Finding(kind, "so it is")])
    assert report.status == (kind in (REFUSED, FAULT))
    assert f"**{kind}**: so it is" in report.text()
