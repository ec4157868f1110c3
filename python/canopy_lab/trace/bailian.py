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
    """The first chat of every conversation, for the ``max_chats`` most recently used chats.

    A parent that was dropped, or that is older than the trace, becomes a root.
    """

    def __init__(self, max_chats: int = MAX_CHATS) -> None:
        self._root_by_chat: OrderedDict[int, int] = OrderedDict()
        self._max_chats = max_chats

    def add(self, chat_id: int, parent_id: int) -> int:
        """Return the root chat of ``chat_id``, whose predecessor is ``parent_id`` (below 0: none)."""
        if parent_id < 0:
            root = chat_id
        elif parent_id in self._root_by_chat:
            root = self._root_by_chat[parent_id]
            self._root_by_chat.move_to_end(parent_id)
        else:
            root = self._root_by_chat[parent_id] = parent_id
        self._root_by_chat[chat_id] = root
        while len(self._root_by_chat) > self._max_chats:
            self._root_by_chat.popitem(last=False)
        return root


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the requests of ``path``, in constant memory."""
    time_order, roots, trimmed_lists = lines.TimeOrder(), Roots(), 0

    def parse(line: int, text: bytes) -> TraceRequest:
        nonlocal trimmed_lists
        record = lines.parse_object(text)
        chat_id = lines.count(record, "chat_id")
        parent_id = lines.count(record, "parent_chat_id", minimum=-1)
        input_tokens = lines.count(record, "input_length")
        output_tokens = lines.count(record, "output_length")
        turn = lines.count(record, "turn", minimum=1)
        blocks = lines.block_ids(record)
        category = record.get("type")
        if not isinstance(category, str) or not category:
            raise lines.BadLine(f"'type' must be a word (text, search, ...), got {category!r}")
        time_s = time_order.check(lines.number(record, "timestamp"))
        max_blocks = -(-input_tokens // BLOCK_TOKENS)
        if len(blocks) > max_blocks:
            # According to the publishers, the last block may contain padding.
            trimmed_lists += 1
            blocks = blocks[:max_blocks]
        return TraceRequest(
            time_s, input_tokens, output_tokens, blocks, BLOCK_TOKENS,
            category=category, turn=turn, conversation=str(roots.add(chat_id, parent_id)), line=line,
        )  # fmt: skip

    yield from lines.parse_lines(path, tolerance, parse)
    if trimmed_lists:
        lines.log.warning("%s: cut %d block lists longer than their prompt", path, trimmed_lists)
