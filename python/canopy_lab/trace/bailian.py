"""The Qwen-Bailian anonymised usage traces: JSON lines with 16-token blocks.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521,
     "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090, 1091, 6326]}

Times are seconds from the start of the trace; ``parent_chat_id`` is -1 for a first turn; ``type``
(text, search, image, file, ...) is the workload category of the ATC 2025 paper. The conversation
is the root of the chain of parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from canopy_lab.trace import lines
from canopy_lab.trace.record import TraceRequest

BLOCK_TOKENS = 16
MAX_CHATS = 1_000_000


class Roots:
    """The first chat of every conversation, for the ``limit`` most recently used chats.

    A parent that was dropped, or that is older than the trace, becomes a root.
    """

    def __init__(self, limit: int = MAX_CHATS) -> None:
        self._root: OrderedDict[int, int] = OrderedDict()
        self._limit = limit

    def add(self, chat: int, parent: int) -> int:
        """Return the root chat of ``chat``, whose predecessor is ``parent`` (below 0: none)."""
        if parent < 0:
            root = chat
        elif parent in self._root:
            root = self._root[parent]
            self._root.move_to_end(parent)
        else:
            root = self._root[parent] = parent
        self._root[chat] = root
        while len(self._root) > self._limit:
            self._root.popitem(last=False)
        return root


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the requests of ``path``, in constant memory."""
    clock, roots, trimmed = lines.TimeOrder(), Roots(), 0

    def parse(line: int, text: bytes) -> TraceRequest:
        nonlocal trimmed
        record = lines.parse_object(text)
        chat = lines.count(record, "chat_id")
        parent = lines.count(record, "parent_chat_id", minimum=-1)
        tokens = lines.count(record, "input_length")
        output = lines.count(record, "output_length")
        turn = lines.count(record, "turn", minimum=1)
        blocks = lines.block_ids(record)
        category = record.get("type")
        if not isinstance(category, str) or not category:
            raise lines.BadLine(f"'type' must be a word (text, search, ...), got {category!r}")
        time_s = clock.check(lines.number(record, "timestamp"))
        max_blocks = -(-tokens // BLOCK_TOKENS)
        if len(blocks) > max_blocks:
            # According to the publishers, the last block may contain padding.
            trimmed += 1
            blocks = blocks[:max_blocks]
        return TraceRequest(
            time_s, tokens, output, blocks, BLOCK_TOKENS,
            category=category, turn=turn, conversation=str(roots.add(chat, parent)), line=line,
        )  # fmt: skip

    yield from lines.parse_lines(path, tolerance, parse)
    if trimmed:
        lines.log.warning("%s: cut %d block lists longer than their prompt", path, trimmed)
