"""Names the missing data of files that look like logs and cannot be simulated."""

from __future__ import annotations

from typing import Any

_NO_TIMES = "give a log of a gateway or a server, which has the time of each request"

_HEADERS = {
    b"Timestamp,Model,Request tokens": (
        "BurstGPT has times and lengths and not which prompts begin alike, so no cache can be simulated on it"
    ),
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
    if "trajectory" in entry:
        return f"SWE-agent's trajectories have no times; {_NO_TIMES}"
    if isinstance(entry.get("data"), list) and "payloads" in str(entry["data"])[:2000]:
        return f"AIPerf's inputs.json has no times; {_NO_TIMES}"
    if "metrics" in entry and "metadata" in entry and "input_sequence_length" in entry["metrics"]:
        return "AIPerf's profile export has lengths and no prompts; give the trace that it replayed"
    if {"action", "source", "id"} <= set(entry) and "messages" not in entry:
        return "OpenHands' events are not whole prompts; give the log of the gateway or the model server"
    return None
