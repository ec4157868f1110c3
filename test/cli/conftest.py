"""Traces that several commands are tried on."""

import json
import random

import pytest


@pytest.fixture
def conversations(tmp_path):
    """Writes a small Mooncake trace: twelve conversations that grow, in random turns."""

    def write(requests, gap_ms):
        draw = random.Random(0)
        paths, ids, lines = [[] for _ in range(12)], iter(range(10_000)), []
        for number in range(requests):
            path = draw.choice(paths)
            path += [next(ids) for _ in range(draw.randint(1, 4))]
            row = {
                "timestamp": number * gap_ms,
                "input_length": len(path) * 512 - draw.choice((0, 100)),
                "output_length": 20,
                "hash_ids": path,
            }
            lines.append(json.dumps(row))
        file = tmp_path / "trace.jsonl"
        file.write_text("\n".join(lines) + "\n")
        return file

    return write
