"""Which format a log is in, from its first lines."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from canopy_lab.trace import azure, lines, openai_log
from canopy_lab.trace.sglang_prompt import is_event
from sglang_canopy.errors import CanopyError

_LOOK_AT = 10_000
"""Lines; a server's log begins with others, and health checks may be many."""


def guess_format(path: Path | str) -> str:
    """A name that ``open_trace`` knows. Raises ``CanopyError`` where nothing fits."""
    path = lines.existing(path)
    if path.is_dir() or ".tar" in path.suffixes or path.suffix == ".tgz":
        return "agentic"
    text = b""
    for _, raw in islice(lines.read_lines(path), _LOOK_AT):
        text = raw.strip()
        if text.startswith(",".join(azure.COLUMNS).encode()):
            return "azure"
        if b"server_args=" in text or is_event(text):
            return "sglang"
        if b"Received request" in text or (b"Request " in text and b" details: prompt" in text):
            return "vllm"
        if _begins_json(text):
            found = _json_format(text)
            if found:
                return found
    if not text:
        raise CanopyError(f"{str(path)!r} is empty; give a log that has requests")
    raise CanopyError(
        f"cannot tell the format of {str(path)!r} from its first {_LOOK_AT} lines; say --format"
    )


def _begins_json(text: bytes) -> bool:
    """An object, or a list of them; ``[2026-01-02 03:04:05]`` is a log's stamp."""
    return text.startswith(b"{") or (
        text.startswith(b"[") and text[1:].lstrip()[:1] in (b"", b"{", b"]")
    )


def _json_format(text: bytes) -> str | None:
    if text.startswith(b"["):
        return "openai"
    try:
        entry = json.loads(text)
    except ValueError:
        # The first line of a document that goes on: an agentic conversation, if it is JSON at all.
        return "agentic" if text == b"{" else None
    if "hash_ids" in entry:
        if "chat_id" in entry:
            return "bailian"
        return "mooncake" if "input_length" in entry else "agentic"
    if "requests" in entry and "block_size" in entry:
        return "agentic"
    names = (*openai_log.INPUTS, "body", "request", "standard_logging_object")
    return "openai" if any(name in entry for name in names) else None
