"""``canopy advise`` as a user runs it."""

from __future__ import annotations

import json

import pytest

from canopy_lab.cli.main import main


@pytest.fixture
def chats(tmp_path):
    """A gateway's log: forty conversations of three turns, a third of the questions the same."""
    path = tmp_path / "chats.jsonl"
    with path.open("w") as out:
        for at in range(120):
            talk, turn = at % 40, at // 40
            messages = [{"role": "system", "content": "Be brief. " * 60}]
            for k in range(turn + 1):
                messages.append({"role": "user", "content": f"secret {talk} {k} " * 30})
                messages.append({"role": "assistant", "content": f"{talk}: {k} " * 30})
            row = {"startTime": 1.7e9 + at, "messages": messages[:-1], "completion_tokens": 9}
            out.write(json.dumps(row) + "\n")
    return path


def advise(tmp_path, log, *more):
    out = tmp_path / "page.html"
    common = ["--capacity-tokens", "20000", "--out", str(out), "--jobs", "1"]
    return main(["advise", str(log), *common, *more]), out


def test_a_log_becomes_a_page_a_summary_and_numbers(chats, tmp_path, capsys):
    numbers = tmp_path / "advice.json"
    status, out = advise(tmp_path, chats, "--json", str(numbers), "--host-gb", "8,16")
    said = capsys.readouterr().out
    assert status == 0
    assert "120 requests" in said
    assert "16 GB of host memory" in said
    got = json.loads(numbers.read_text())
    assert got["decision"]["sentence"] in said
    assert 0.3 < got["repeats"] < 1
    assert got["decision"]["sentence"].split()[0] in ("Use", "Keep")
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["advise", "none.jsonl"], "no trace at 'none.jsonl'"),
        (["advise", "LOG", "--capacity-tokens", "0"], "--capacity-tokens must be above 0"),
        (["advise", "LOG", "--host-gb", "much"], "--host-gb must be sizes in GB"),
        (["advise", "LOG", "--profile", "h300"], "profile 'h300' is neither"),
        (["advise", "LOG", "--out", "/no/such/page.html"], "its folder does not exist"),
        (["advise", "LOG", "--tokenizer", "/no/such"], "give a tokenizer.json"),
        (["advise", "LOG", "--format", "mooncake", "--tokenizer", "t"], "--tokenizer is for logs"),
        (["advise", "LOG", "--jobs", "0"], "--jobs must be 1 or more"),
        (["advise", "LOG", "--sample-requests", "0"], "1 request or more"),
    ],
)
def test_a_mistake_is_one_line(chats, tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    given = [str(chats) if a == "LOG" else a for a in arguments]
    assert main(given) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("canopy ")]
    assert len(lines) == 1
    assert says in lines[0]
