"""Recognise the format of a log from its first lines."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from canopy_lab.trace import container, fields, lines, mooncake, openai_log
from canopy_lab.trace.entries import csv_columns
from canopy_lab.trace.sglang_prompt import is_event
from sglang_canopy.errors import CanopyError

_CALL_FIELDS = {*openai_log.PROMPT_FIELDS, *fields.BODY_FIELDS}
_MAX_LINES = 10_000
"""Maximum lines read: a server's log begins with other lines, and may have many health checks."""
_MAX_FILES = 16
"""Maximum files of a folder that are read to recognise it."""
_MAX_JSON_BYTES = 64 << 20
"""Maximum bytes of a multi-line JSON document that are read to recognise it."""


def guess_format(path: Path | str) -> str:
    """Return a format name for ``open_trace``. Raises ``CanopyError`` if no format fits."""
    path = lines.readable_path(path)
    if path.is_dir():
        logs = lines.files_of(path)
        return _format_of_logs(logs) if logs and not any(path.glob("*.json")) else "agentic"
    if ".tar" in path.suffixes or path.suffix == ".tgz":
        return "agentic"
    text = b""
    for number, raw in islice(lines.read_lines(path), _MAX_LINES):
        text = raw.strip()
        if (
            (b"server_args=" in text and not container.is_foreign(text))
            or b"Receive: obj=" in text
            or is_event(text)
        ):
            return "sglang"
        if b"Received request" in text or (b"Request " in text and b" details: prompt" in text):
            return "vllm"
        if _begins_json(text):
            entry = _first_entry(text, path)
            format = None if entry is None else _json_format(entry)
            if format:
                return format
        if text and number == 1 and _CALL_FIELDS & set(csv_columns(path)):
            return "openai"
    if not text:
        raise CanopyError(f"{str(path)!r} is empty; give a log that has requests")
    if container.is_foreign(text):
        names = ", ".join(sorted(json.loads(text)))[:200]
        raise CanopyError(
            f"{str(path)!r} has objects with the fields {names}, and no request below them: if a collector "
            "wrapped the log, give the server's own lines"
        )
    raise CanopyError(
        f"cannot tell the format of {str(path)!r} from its first {_MAX_LINES} lines: a log has the time and "
        "the prompt of each request (docs/reference/traces.md); give one, or --format"
    )


def _format_of_logs(files: list[Path]) -> str:
    """Return the format of a folder's logs. Raises ``CanopyError`` if they have several, or none."""
    formats: dict[str, Path] = {}
    for file in files[:_MAX_FILES]:
        if file.stat().st_size:
            formats.setdefault(guess_format(file), file)
    if len(formats) > 1:
        listing = ", ".join(f"{file.name} of format {name}" for name, file in formats.items())
        raise CanopyError(f"folder {str(files[0].parent)!r} has logs of several formats: {listing}")
    if not formats:
        raise CanopyError(
            f"the logs in {str(files[0].parent)!r} are empty; give a log that has requests"
        )
    return next(iter(formats))


def _begins_json(text: bytes) -> bool:
    """Return whether a line begins an object or a list of objects, not a time in brackets."""
    return text.startswith(b"{") or (
        text.startswith(b"[") and text[1:].lstrip()[:1] in (b"", b"{", b"]")
    )


def _first_entry(text: bytes, path: Path) -> dict[str, Any] | None:
    """Parse the entry on this line, or the first entry of a multi-line document or list."""
    try:
        value = json.loads(text)
    except ValueError:
        if text not in (b"{", b"[") and not text.startswith(b"["):
            return None
        with lines.open_binary(path) as stream:
            head_bytes = stream.read(_MAX_JSON_BYTES)
        try:
            value = json.loads(head_bytes)
        except ValueError:
            # The list is too long to be read here, or not JSON.
            return {"messages": []} if text.startswith(b"[") else {"requests": [], "block_size": 0}
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, dict) else None


def _json_format(entry: dict[str, Any]) -> str | None:
    if mooncake.is_dynamo_event(entry):
        return "mooncake"
    if "hash_ids" in entry:
        if "chat_id" in entry:
            return "bailian"
        return "mooncake" if "input_length" in entry else "agentic"
    if "requests" in entry and "block_size" in entry:
        return "agentic"
    is_call = any(name in entry for name in _CALL_FIELDS)
    if "resourceSpans" in entry or ("attributes" in entry and not is_call):
        return "otel"
    return "openai" if is_call else None
