"""`canopy doctor` on command lines of public reports, compared with the started server."""

import json
import shlex
from pathlib import Path

import pytest

from doctor.public_lines import LINES, OK, REFUSED, UNKNOWN
from doctor.started_lines import AUTO, arguments
from support.doctored import in_a_process, reports_on

SERVER = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang_canopy.config import auto
from sglang_canopy.config.refusals import POLICIES, unsupported
from sglang_canopy.config.server_options import options_of
from sglang_canopy.server.scheduler.queue import refuse_unsupported

answers = {}
for name, argv in json.loads(sys.argv[1]).items():
    try:
        server_args = prepare_server_args(argv)
    except SystemExit as stop:
        said = str(stop.code)
        answers[name] = ["refused" if "sglang-canopy" in said else "unknown flags", said]
        continue
    try:
        server_args.resolve_once()
        resolved = ""
    except Exception as error:  # requires hardware that this machine lacks
        resolved = f"{type(error).__name__}: {error}"
    options = options_of(server_args)
    refusal = unsupported(POLICIES, server_args)
    refuse_unsupported(options.queue, server_args)
    parts = [part.to_json() for part in auto.state(server_args, options)]
    answers[name] = ["starts" if refusal is None else "refused", refusal, parts, resolved]
print("ANSWER" + json.dumps(answers))
"""
NAMES = [str(number) for number in range(len(LINES))]


@pytest.fixture(scope="module")
def words(tiny_model: Path, tmp_path_factory) -> dict[str, list[str]]:
    """The words after ``canopy doctor`` of each line."""
    folder, found = tmp_path_factory.mktemp("deployed"), {}
    for name, line in zip(NAMES, LINES, strict=True):
        if "\n" in line.command:
            auto = '"--radix-eviction", "auto"' if '"AUTO"' in line.command else AUTO
            text = line.command.replace('"AUTO"', auto).replace("AUTO", auto)
            text = text.replace('"M"', f'"{tiny_model}"').replace(" M", f" {tiny_model}")
            (folder / f"{name}.yaml").write_text(text)
            found[name] = [str(folder / f"{name}.yaml")]
        else:
            given = shlex.split(f"{line.command} {AUTO}")
            found[name] = [str(tiny_model) if word == "M" else word for word in given]
    return found


@pytest.fixture(scope="module")
def doctor(words) -> dict:
    return reports_on(words)


@pytest.fixture(scope="module")
def server(words, tiny_model: Path) -> dict:
    """SGLang's own parser, resolution and Canopy's checks at the start, on the server's words."""
    given = {}
    for name, line in zip(NAMES, LINES, strict=True):
        argv = arguments(line)
        given[name] = [str(tiny_model) if word == "M" else word for word in argv]
    return in_a_process(SERVER, given)


def outcome(report: dict) -> str:
    if report["code"] == 2:
        return UNKNOWN
    return REFUSED if any(one["kind"] == "refused" for one in report["findings"]) else OK


@pytest.mark.parametrize("name", NAMES, ids=[line.source[-40:] for line in LINES])
def test_the_doctor_answers_as_the_server_behaves(doctor, server, name) -> None:
    line, report = LINES[int(name)], doctor[name]
    assert outcome(report) == server[name][0] == line.expected, (report, server[name])
    assert line.said in json.dumps(report)
    if line.expected == OK:
        assert report["auto"] == server[name][2]
        off = {part["name"] for part in report["auto"] if not part["active"]}
        assert off - {"write policy"} == set(line.off)
        assert all(part["why"] and part["change"] for part in report["auto"] if not part["active"])


def test_25_lines_have_25_sources() -> None:
    assert len({line.source for line in LINES}) == len(LINES) == 25


def test_resolution_ran_for_nearly_all_lines_that_start(server) -> None:
    """Only lines with hardware of their own stop in SGLang's resolution on this machine."""
    stopped = [answer[3] for answer in server.values() if answer[0] == OK and answer[3]]
    assert len(stopped) <= 2, stopped
