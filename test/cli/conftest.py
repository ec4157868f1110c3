"""A trace for the tests of several commands."""

import json
import random

import pytest


@pytest.fixture
def write_conversations(tmp_path):
    """``write_conversations(requests, gap_ms)``: write a Mooncake trace of twelve conversations that grow."""

    def write(requests, gap_ms):
        rng = random.Random(0)
        paths, ids, lines = [[] for _ in range(12)], iter(range(10_000)), []
        for i in range(requests):
            path = rng.choice(paths)
            path += [next(ids) for _ in range(rng.randint(1, 4))]
            fields = {
                "timestamp": i * gap_ms,
                "input_length": len(path) * 512 - rng.choice((0, 100)),
                "output_length": 20,
                "hash_ids": path,
            }
            lines.append(json.dumps(fields))
        trace_path = tmp_path / "trace.jsonl"
        trace_path.write_text("\n".join(lines) + "\n")
        return trace_path

    return write
