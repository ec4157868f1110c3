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

_NO_TIMES = "give a log of a gateway or a server, which has the time of each request"

_NO_CONTENT = (
    "has times and lengths and not which prompts begin alike, so no cache can be simulated on it"
)
_HEADERS = {
    b"TIMESTAMP,": f"Azure's trace {_NO_CONTENT}",
    b"Timestamp,Model,Request tokens": f"BurstGPT {_NO_CONTENT}",
}


def why_line(text: bytes) -> str | None:
    """Return a sentence on the missing data of a known file, or ``None``."""
    for header, why in _HEADERS.items():
        if text.startswith(header):
            return why
    if b"HTTP/1." in text and (b'"POST ' in text or b'"GET ' in text):
        return "an access log of a web server has no prompts; give the log of the gateway or the model server"
    return None


def why_entry(entry: dict[str, Any]) -> str | None:
    """Return a sentence on the missing data of a known JSON file, or ``None``."""
    talk = entry.get("conversation", entry.get("conversations"))
    if isinstance(talk, list) and talk and isinstance(talk[0], dict):
        if "value" in talk[0]:
            return f"ShareGPT has conversations without times; {_NO_TIMES}"
        if "conversation_hash" in entry:
            return (
                "WildChat has one time for a conversation, and neither system prompts nor tools; "
                f"{_NO_TIMES}"
            )
        if "conversation_id" in entry:
            return f"LMSYS-Chat has conversations without times; {_NO_TIMES}"
    if "custom_id" in entry and "response" in entry and "body" not in entry:
        return "a batch's output file has answers and no prompts; give the batch's input file"
    if _is_agents_session(entry):
        return (
            "a session file of Claude Code or Codex lacks the tools and system prompts that were sent; "
            "give the log of the gateway or the model server"
        )
    if "trajectory" in entry:
        return f"SWE-agent's trajectories have no times; {_NO_TIMES}"
    if isinstance(entry.get("data"), list) and "payloads" in str(entry["data"])[:2000]:
        return f"AIPerf's inputs.json has no times; {_NO_TIMES}"
    if "metrics" in entry and "metadata" in entry and "input_sequence_length" in entry["metrics"]:
        return "AIPerf's profile export has lengths and no prompts; give the trace that it replayed"
    if {"action", "source", "id"} <= set(entry) and "messages" not in entry:
        return "OpenHands' events are not whole prompts; give the log of the gateway or the model server"
    return None


_CODEX_KINDS = ("session_meta", "response_item", "turn_context", "event_msg", "compacted")


def _is_agents_session(entry: dict[str, Any]) -> bool:
    if entry.get("type") in _CODEX_KINDS and isinstance(entry.get("payload"), dict):
        return True
    named = "sessionId" in entry and ("uuid" in entry or "message" in entry or "snapshot" in entry)
    return named or (entry.get("type") == "summary" and "leafUuid" in entry)


_LOOK_AT = 10_000
"""Maximum lines read: a server's log begins with other lines, and may have many health checks."""
_LOOK_AT_FILES = 16
"""Maximum files of a folder that are read to recognise it."""
_LARGEST_DOCUMENT = 64 << 20
"""Maximum bytes of a multi-line JSON document that are read to recognise it."""


def guess_format(path: Path | str) -> str:
    """Return a format name for ``open_trace``. Raises ``CanopyError`` if no format fits."""
    path = lines.existing(path)
    if path.is_dir():
        logs = lines.files_of(path)
        return _format_of_logs(logs) if logs and not any(path.glob("*.json")) else "agentic"
    if ".tar" in path.suffixes or path.suffix == ".tgz":
        return "agentic"
    text, why = b"", None
    for number, raw in islice(lines.read_lines(path), _LOOK_AT):
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
            found = None if entry is None else _json_format(entry)
            if found:
                return found
            why = why or (None if entry is None else why_entry(entry))
        if text and number == 1 and set(csv_columns(path)) & {*openai_log.INPUTS, *fields.BODIES}:
            return "openai"
        why = why or why_line(text)
    if not text:
        raise CanopyError(f"{str(path)!r} is empty; give a log that has requests")
    if why:
        raise CanopyError(f"{str(path)!r} cannot be used: {why}")
    if container.is_foreign(text):
        names = ", ".join(sorted(json.loads(text)))[:200]
        raise CanopyError(
            f"{str(path)!r} has objects with the fields {names}, and no request below them: if a collector "
            "wrapped the log, give the server's own lines"
        )
    raise CanopyError(
        f"cannot tell the format of {str(path)!r} from its first {_LOOK_AT} lines; give --format"
    )


def _format_of_logs(files: list[Path]) -> str:
    """Return the format of a folder's logs. Raises ``CanopyError`` if they have several, or none."""
    formats: dict[str, Path] = {}
    for file in files[:_LOOK_AT_FILES]:
        if file.stat().st_size:
            formats.setdefault(guess_format(file), file)
    if len(formats) > 1:
        each = ", ".join(f"{file.name} of format {name}" for name, file in formats.items())
        raise CanopyError(f"folder {str(files[0].parent)!r} has logs of several formats: {each}")
    if not formats:
        raise CanopyError(
            f"the logs in {str(files[0].parent)!r} are empty; give a log that has requests"
        )
    return next(iter(formats))


def _begins_json(text: bytes) -> bool:
    """Return whether a line begins an object or a list of objects; ``[2026-01-02 03:04:05]`` is a
    log's time."""
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
            whole = stream.read(_LARGEST_DOCUMENT)
        try:
            value = json.loads(whole)
        except ValueError:
            # The list is too long to be read here, or not JSON.
            return {"messages": []} if text.startswith(b"[") else {"requests": [], "block_size": 0}
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, dict) else None


def _json_format(entry: dict[str, Any]) -> str | None:
    if mooncake.is_dynamos(entry):
        return "mooncake"
    if "hash_ids" in entry:
        if "chat_id" in entry:
            return "bailian"
        return "mooncake" if "input_length" in entry else "agentic"
    if "requests" in entry and "block_size" in entry:
        return "agentic"
    if why_entry(entry):
        return None
    names = (*openai_log.INPUTS, *fields.BODIES)
    is_call = any(name in entry for name in names)
    if "resourceSpans" in entry or ("attributes" in entry and not is_call):
        return "otel"
    return "openai" if is_call else None
