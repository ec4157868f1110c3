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
from sglang_canopy.config.refusals import unsupported_reason, unsupported_reasons
from sglang_canopy.config.setups import POLICIES, SETUPS
from sglang_canopy.doctor import examine, machine
from sglang_canopy.doctor.command_line import HIDDEN, mask_secrets, server_arguments
from sglang_canopy.doctor.examine import Report
from sglang_canopy.doctor.machine import FAULT, NOTE, REFUSED, UNTESTED, Finding
from sglang_canopy.errors import CanopyError
from sglang_canopy.storage.settings import DYNAMIC_BACKEND
from support import forked

REPORT_LABEL = "ANSWER"
"""Text before the report, since imports may print too."""
_DOCTOR_PROGRAM = """
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


def run_doctor(commands: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the doctor's report on each command line, with its exit status and error output."""
    process = forked.run([sys.executable, "-c", _DOCTOR_PROGRAM, json.dumps(commands)], timeout=400)
    assert process.returncode == 0, process.stderr[-3000:]
    reports: dict[str, Any] = json.loads(process.stdout.rpartition(REPORT_LABEL)[2])
    return reports


BASE_FLAGS = "--model-path /none --device cpu --port {port} "
COMMAND_LINES = {
    "plain": BASE_FLAGS + "--radix-eviction wa",
    "sglangs own": BASE_FLAGS + "--radix-eviction lru --enable-lmcache --tp-size 4",
    "two refused": BASE_FLAGS + "--radix-eviction wa --enable-lmcache --use-ray",
    "untested": BASE_FLAGS + "--radix-eviction wa --tp-size 4 --enable-hierarchical-cache",
    "no such plan": BASE_FLAGS + "--radix-eviction wa --config /no/such/plan.yaml",
    "short flags": "sglang serve /none --device cpu --port {port} --radix-eviction wa --tp 8 --dp 8 "
    "--api-k opensesame",
    "no device": "sglang serve /none --port {port} --radix-eviction wa",
    "unknown flag": BASE_FLAGS + "--no-such-flag",
    "bad number": BASE_FLAGS + "--tp-size two",
    "disk": "sglang serve /none --device cpu --port {port} --radix-eviction wa "
    "--enable-hierarchical-cache --hicache-storage-backend canopy "
    "--hicache-storage-prefetch-policy best_effort "
    """--hicache-storage-backend-extra-config '{{"path": "{folder}"}}' --api-key opensesame""",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict:
    """Return the reports on ``COMMAND_LINES``, from another process, since SGLang is hooked there."""
    plain_file = tmp_path_factory.mktemp("doctor") / "file"
    plain_file.write_text("not a folder")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free_port = listener.getsockname()[1]
    command_lines = {
        name: shlex.split(line.format(port=free_port, folder=plain_file / "disk"))
        for name, line in COMMAND_LINES.items()
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        command_lines["busy port"] = [*shlex.split(COMMAND_LINES["plain"].format(port=port))]
        return run_doctor(command_lines)


def texts_of_kind(report: dict, kind: str) -> list[str]:
    return [finding["text"] for finding in report["findings"] if finding["kind"] == kind]


UNTESTED_SETUPS = {
    "plain": [],
    "sglangs own": None,
    "untested": ["`--tp-size` above 2: device, host"],
    "no device": ["CUDA: device"],  # the default of SGLang
    "short flags": None,
}
"""Untested set-ups by command line, of those that start; ``None``: not compared."""


@pytest.mark.parametrize("name", UNTESTED_SETUPS)
def test_a_server_that_starts_has_no_refusal_and_its_untested_set_ups_listed(reports, name) -> None:
    assert reports[name]["code"] == 0
    assert not texts_of_kind(reports[name], REFUSED)
    assert UNTESTED_SETUPS[name] in (None, texts_of_kind(reports[name], UNTESTED))


def test_all_refusals_are_reported_at_once_with_remedies(reports) -> None:
    refusals = texts_of_kind(reports["two refused"], REFUSED)
    assert reports["two refused"]["code"] == 1
    assert [any(name in t for t in refusals) for name in ("lmcache", "--use-ray")] == [True] * 2
    assert all("--radix-eviction lru" in t for t in refusals)
    assert len(refusals) == 2, "the start's own sentence is one of them"


def test_a_prefetch_that_waits_for_nothing_is_noted(reports) -> None:
    (note,) = [text for text in texts_of_kind(reports["disk"], NOTE) if "best_effort" in text]
    assert "timeout" in note
    assert not [text for text in texts_of_kind(reports["plain"], NOTE) if "best_effort" in text]


def test_flags_are_shortened_as_sglang_allows(reports) -> None:
    untested = texts_of_kind(reports["short flags"], UNTESTED)
    assert "`--tp-size` above 2: device" in untested
    assert "opensesame" not in json.dumps(reports["short flags"])


@pytest.mark.parametrize(
    ("name", "named_part"),
    [("unknown flag", "--no-such-flag"), ("bad number", "two"), ("no such plan", "plan.yaml")],
)
def test_a_command_line_that_cannot_be_read_is_a_mistake(reports, name, named_part) -> None:
    assert reports[name]["code"] == 2
    assert named_part in reports[name]["stderr"]
    assert "Traceback" not in reports[name]["stderr"]


def test_a_used_port_and_a_missing_folder_are_faults(reports) -> None:
    (port_fault,) = texts_of_kind(reports["busy port"], FAULT)
    assert "cannot be used" in port_fault
    (folder_fault,) = texts_of_kind(reports["disk"], FAULT)
    assert "is not a folder" in folder_fault
    assert reports["busy port"]["code"] == reports["disk"]["code"] == 1


def test_a_whole_launch_command_is_read_and_its_key_is_hidden(reports) -> None:
    assert reports["disk"]["flags"].startswith("--model-path /none ")
    assert "opensesame" not in json.dumps(reports)


def test_the_environment_is_in_every_report(reports) -> None:
    names = {"canopy", "python", "torch", "sglang", "torch build", "compiler", "open files"}
    assert names <= reports["plain"]["environment"].keys()


def test_every_refusal_that_applies_is_listed_and_the_first_is_the_servers() -> None:
    refusing = [row for row in SETUPS if row.reason(POLICIES) and row.option and row.applies(True)]
    args = SimpleNamespace(**{row.option: True for row in refusing})
    refusals = list(unsupported_reasons(POLICIES, args, environment={}))
    assert len(refusals) == len(refusing)
    assert refusals[0] == unsupported_reason(POLICIES, args, environment={})


@pytest.mark.parametrize(
    "argv",
    [
        ["sglang", "serve", "M", "--x"],
        ["python", "-m", "sglang.launch_server", "--model-path", "M", "--x"],
        ["M", "--x"],
        ["--model-path", "M", "--x"],
    ],
)
def test_a_launch_command_may_be_pasted_as_it_is(argv) -> None:
    assert server_arguments(argv) == ["--model-path", "M", "--x"]


def test_a_command_of_something_else_is_refused() -> None:
    with pytest.raises(CanopyError, match="sglang serve MODEL"):
        server_arguments(["docker", "run", "image"])


@given(st.text(min_size=4, alphabet="QXZ987"), st.booleans())
def test_no_key_is_ever_shown(secret, joined) -> None:
    argv: list[str] = []
    for flag in ("--api-key", "--admin-api-key", "--ssl-key-password"):
        argv += [f"{flag}={secret}"] if joined else [flag, secret]
    argv += ["--extra", json.dumps({"a": [{"access_token": secret}], "quota_bytes": {secret: 1}})]
    argv += ["--canopy-disk", f'tenant_quota_gb={{"{secret}": 1, "*": 2}}']
    argv += ["--url", f"http://me:{secret}@host/", "--broken", "{" + secret]
    text = " ".join(mask_secrets(argv))
    assert secret not in text
    assert HIDDEN in text


def test_a_switch_after_a_key_is_not_its_value() -> None:
    assert mask_secrets(["--api-key", "--port", "3"]) == ["--api-key", "--port", "3"]


def distribution(version: str, folder: str) -> SimpleNamespace:
    metadata = {"Name": "sglang"}
    return SimpleNamespace(version=version, metadata=metadata, locate_file=lambda _: Path(folder))


@pytest.mark.parametrize(
    ("installed", "kind", "text"),
    [
        ([], FAULT, "not installed"),
        ([("0.0.1", "/a")], NOTE, SGLANG_VERSION),
        ([(SGLANG_VERSION, "/a"), (SGLANG_VERSION, "/b")], FAULT, "two sglangs"),
        *(([(tested, "/a"), (tested, "/a")], None, "") for tested in releases.TESTED_RELEASES),
    ],
)
def test_a_missing_untested_or_second_sglang_is_reported(installed, kind, text) -> None:
    findings = machine.check_packages([distribution(*fields) for fields in installed])
    assert [finding.kind for finding in findings] == ([kind] if kind else [])
    assert all(text in finding.text for finding in findings)


def test_a_machine_without_a_compiler_is_a_fault(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    findings = machine.check_tools({})
    assert FAULT in [finding.kind for finding in findings]
    assert "gcc" in findings[0].text


def test_a_folder_is_noted_for_too_little_space_and_for_open_rights(tmp_path) -> None:
    tmp_path.chmod(0o700)
    assert machine.check_folder("disk", tmp_path / "not" / "there" / "yet") == []
    assert machine.check_folder("disk", tmp_path) == []
    (note,) = machine.check_folder("disk", tmp_path, 10**18)
    assert note.kind == NOTE
    tmp_path.chmod(0o755)
    (note,) = machine.check_folder("disk", tmp_path)
    assert "chmod 700" in note.text


def test_a_host_tier_larger_than_the_memory_is_a_fault(monkeypatch) -> None:
    from sglang.srt.mem_cache import host_memory
    from sglang.srt.mem_cache.pool_host import base

    available_bytes = 24 * 2**30
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 10 * 2**30)
    monkeypatch.setattr(host_memory, "available_host_memory_bytes", lambda **_: available_bytes)
    assert machine.check_host_memory(0) == machine.check_host_memory(13e9) == []
    (fault,) = machine.check_host_memory(16e9)
    assert fault.kind == FAULT
    assert "16.0 GB" in fault.text
    available_bytes = 9 * 2**30
    (fault,) = machine.check_host_memory(0)
    assert "none is left" in fault.text


@pytest.mark.parametrize(
    ("ranks", "rank_count"),
    [
        ({"tp_size": 4, "pp_size": 2, "nnodes": 2}, 4),
        ({"tp_size": 2, "dp_size": 2}, 4),
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 2),
    ],
)
def test_space_is_checked_for_every_rank_on_the_machine(monkeypatch, ranks, rank_count) -> None:
    defaults = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1, "enable_dp_attention": False}
    disk_config = {**DYNAMIC_BACKEND, "path": "/d", "capacity_bytes": 10**9}
    disk_flags = {"hicache_storage_backend_extra_config": json.dumps(disk_config), "device": "cuda"}
    host_flags = {"canopy_host_gb": 1.0, "hicache_size": 0, "enable_hierarchical_cache": True}
    args = {**disk_flags, **host_flags, **defaults, **ranks}
    sizes_bytes = []
    monkeypatch.setattr(machine, "check_port", lambda *_: [])
    monkeypatch.setattr(machine, "check_host_memory", lambda size: sizes_bytes.append(size) or [])
    monkeypatch.setattr(machine, "check_folder", lambda *args: sizes_bytes.append(args[-1]) or [])
    monkeypatch.setattr(examine.command_line, "used_parts", lambda _args: {"disk"})
    assert examine._check_resources(SimpleNamespace(host="", port=1, **args)) == []
    assert sizes_bytes == [rank_count * 10**9] * 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_a_fault(tmp_path) -> None:
    tmp_path.chmod(0o500)
    (fault,) = machine.check_folder("disk", tmp_path / "disk")
    assert fault.kind == FAULT


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_out_of_range_is_a_fault(port) -> None:
    (fault,) = machine.check_port("127.0.0.1", port)
    assert str(port) in fault.text


@pytest.mark.parametrize("kind", [REFUSED, FAULT, UNTESTED, NOTE])
def test_a_report_has_its_status_and_its_findings_in_words(kind) -> None:
    report = Report("--x", {"python": "3"}, [Finding(kind, "so it is")])
    assert report.status == (kind in (REFUSED, FAULT))
    assert f"**{kind}**: so it is" in report.text()
