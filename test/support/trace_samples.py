"""Small traces for the simulator's tests, and the real traces if they are present."""

import dataclasses
import itertools
import os
import random
from pathlib import Path

import pytest

from canopy_lab.trace import open_trace
from canopy_lab.trace.record import TraceRequest


def record(time_s, blocks, *, block_tokens=10, missing_tokens=0, **options):
    """Return a request of ``blocks``; ``missing_tokens`` tokens are missing from the last block."""
    fields = {
        "input_tokens": len(blocks) * block_tokens - missing_tokens,
        "output_tokens": 1,
        "blocks": tuple(blocks),
        "block_tokens": block_tokens,
        **options,
    }
    return TraceRequest(time_s=float(time_s), **fields)


def single_block_trace(block_ids):
    """Return one request a second, each of a single block: an ordinary cache trace."""
    return [record(time_s, (block,), block_tokens=1) for time_s, block in enumerate(block_ids)]


def random_trace(seed, requests=60, *, branching=3, depth=6):
    """Return requests for random paths of one random tree; a path has 1 to ``depth`` blocks."""
    rng = random.Random(seed)
    id_by_path: dict[tuple[int, ...], int] = {}
    trace = []
    time_s = 0.0
    for _ in range(requests):
        branches = tuple(rng.randrange(branching) for _ in range(rng.randint(1, depth)))
        paths = [branches[: i + 1] for i in range(len(branches))]
        blocks = [id_by_path.setdefault(path, len(id_by_path)) for path in paths]
        trace.append(
            record(
                time_s,
                blocks,
                missing_tokens=rng.choice((0, 0, 3)),
                turn=rng.randint(1, 4),
                category=rng.choice(("chat", "code")),
                stop=rng.choice((None, "tool", "end")),
                output_tokens=rng.randint(1, 30),
                conversation=f"c{branches[0]}",
            )
        )
        time_s += rng.choice((0.0, 1.0, 5.0))
    return trace


def data_folder():
    """Return the real data's folder: CANOPY_DATA, else ``shared/data`` next to the checkout.

    Skips if it is absent."""
    configured_folder = os.environ.get("CANOPY_DATA")
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(configured_folder) if configured_folder else default
    if not folder.is_dir():
        pytest.skip(f"no trace data at {folder}: set CANOPY_DATA to the folder with mooncake/")
    return folder


def mooncake(limit):
    """The first requests of the Mooncake trace, each alone: conversations are not joined."""
    path = data_folder() / "mooncake" / "conversation_first60.jsonl"
    requests = itertools.islice(open_trace(path, "mooncake"), limit)
    return [dataclasses.replace(request, conversation=None) for request in requests]
