"""Mooncake's open traces: JSON lines with 512-token blocks and times in milliseconds.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

``hash_ids`` are prefix-chained and cover the prompt, its last partial block included. The file
names no conversation and no turn: both are inferred from the chain (``infer.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from canopy_lab.trace import lines
from canopy_lab.trace.infer import ConversationIndex
from canopy_lab.trace.record import TraceRequest

BLOCK_TOKENS = 512


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the requests of ``path``; memory O(distinct blocks), for the inference."""
    clock, index = lines.Clock(), ConversationIndex()

    def parse(line: int, text: bytes) -> TraceRequest:
        record = lines.parse_object(text)
        tokens = lines.count(record, "input_length")
        output = lines.count(record, "output_length")
        blocks = lines.block_ids(record)
        if len(blocks) > -(-tokens // BLOCK_TOKENS):
            raise lines.BadLine(
                f"'hash_ids' has {len(blocks)} blocks of {BLOCK_TOKENS} tokens, "
                f"more than {tokens} tokens fill"
            )
        time_s = clock.check(lines.number(record, "timestamp") / 1000)
        conversation, turn, _ = index.add(blocks, tokens, BLOCK_TOKENS)
        return TraceRequest(
            time_s, tokens, output, blocks, BLOCK_TOKENS,
            turn=turn, conversation=str(conversation), line=line,
        )  # fmt: skip

    return lines.each(path, tolerance, parse)
