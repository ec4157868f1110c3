"""Which format a log is in, from its first lines."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from sglang_canopy.errors import CanopyError
from sglang_canopy.trace import azure, hashed, lines, openai_log

_LOOK_AT = 200
"""Lines; a server's log begins with others."""


def guess_format(path: Path | str) -> str:
    """A name that ``open_trace`` knows. Raises ``CanopyError`` where nothing fits."""
    path = lines.existing(path)
    if path.is_dir() or ".tar" in path.suffixes or path.suffix == ".tgz":
        return "agentic"
    for _, raw in islice(lines.read_lines(path), _LOOK_AT):
        text = raw.strip()
        if text.startswith(",".join(azure.COLUMNS).encode()):
            return "azure"
        if b'{"timestamp"' in text and b'"event": "request.' in text:
            return "sglang"
        if b"Received request" in text or (b"Request " in text and b" details: prompt" in text):
            return "vllm"
        if text.startswith((b"{", b"[")):
            found = _json_format(text)
            if found:
                return found
    raise CanopyError(
        f"cannot tell the format of {str(path)!r} from its first {_LOOK_AT} lines; say --format"
    )


def _json_format(text: bytes) -> str | None:
    if text.startswith(b"["):
        return "openai"
    try:
        entry = json.loads(text)
    except ValueError:
        # The first line of a document that goes on: an agentic conversation, if it is JSON at all.
        return "agentic" if text == b"{" else None
    if hashed.HEADER in entry:
        return "hashed"
    if "hash_ids" in entry:
        if "chat_id" in entry:
            return "bailian"
        return "mooncake" if "input_length" in entry else "agentic"
    if "requests" in entry and "block_size" in entry:
        return "agentic"
    names = (*openai_log.INPUTS, "body", "request", "standard_logging_object")
    return "openai" if any(name in entry for name in names) else None
