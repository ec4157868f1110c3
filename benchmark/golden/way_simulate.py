"""A request through ``canopy simulate``: a small trace under ``wa``, in this process."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from paths import SOURCES
from tracer import Tracer

from canopy_lab.cli.main import main

REQUESTS, BLOCKS, CONVERSATIONS = 60, 6, 7


def trace() -> Tracer:
    """The whole command, and the victims that it takes."""
    tracer = Tracer(SOURCES)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in conversations()))
        command = ["simulate", str(file), "--format", "mooncake", "--policy", "wa"]
        command += ["--capacity", "0.1", "--jobs", "1"]
        main(command)  # once untraced, so that imports are not traced
        with tracer.staged("simulate"):
            main(command)
    return tracer


def conversations() -> list[dict[str, object]]:
    """Conversations that take turns, each turn two blocks of 512 tokens longer, in Mooncake's format."""
    lines: list[dict[str, object]] = []
    for number in range(REQUESTS):
        who, turn = number % CONVERSATIONS, number // CONVERSATIONS
        blocks = BLOCKS + 2 * turn
        lines.append(
            {
                "timestamp": 1000 * number,
                "input_length": 512 * blocks,
                "output_length": 512,
                "hash_ids": [1000 * who + block for block in range(blocks)],
            }
        )
    return lines
