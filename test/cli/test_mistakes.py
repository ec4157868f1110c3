"""A mistake on a command line is answered by one line with the remedy, and status 2."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from canopy_lab.cli.main import main

FIXTURES = Path(__file__).parent.parent / "fixtures"
TABLE = yaml.safe_load((FIXTURES / "mistakes.yaml").read_text(encoding="utf-8"))
MISTAKES = [(command, *line) for command, lines in TABLE.items() for line in lines.items()]


def trace_line(**fields: object) -> str:
    return json.dumps({"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [1], **fields})  # fmt: skip


@pytest.fixture
def paths(write_conversations, tmp_path) -> dict[str, Path]:
    texts = {
        "empty": "",
        "backwards": f"{trace_line()}\n{trace_line(timestamp=1)}\n",
        "unfit": f"{trace_line(hash_ids=[*range(9)])}\n{trace_line(input_length=4000)}\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    logs = {
        "log": FIXTURES / "logs" / "traffic-own.jsonl",
        "served": FIXTURES / "logs" / "traffic-sglang.jsonl",
        "texts": FIXTURES / "logs" / "texts-are-measured-by-the-servers-own-counts.jsonl",
    }
    written = {name: tmp_path / name for name in (*texts, "out")}
    return {"trace": write_conversations(120, gap_ms=400), **logs, **written}


@pytest.mark.parametrize(("command", "options", "sentence"), MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(
    paths, tmp_path, monkeypatch, capsys, command, options, sentence
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, path in paths.items():
        command, options = (text.replace(f"{{{name}}}", str(path)) for text in (command, options))
    argv = [*command.split(), *shlex.split(options)]
    assert main(argv) == 2
    printed = capsys.readouterr().err
    (line,) = [line for line in printed.splitlines() if line.startswith("canopy ")]
    assert line.startswith(f"canopy {argv[0]}")
    assert sentence in line
    assert "Traceback" not in printed
