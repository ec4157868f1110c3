"""Session files of coding agents: Claude Code's transcripts and Codex's rollouts.

The path is one file, several files joined, or a folder (``~/.claude/projects``, ``~/.codex/sessions``).
Each answer of the model is one request; its prompt is the session up to that answer. Tools are missing
in both formats, and the system prompt in Claude Code's: prompts are shorter than sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from canopy_lab.trace import calls, fields, lines, usage
from canopy_lab.trace.chat import chat
from canopy_lab.trace.claude_session import ClaudeSessions
from canopy_lab.trace.codex_session import CodexSession
from canopy_lab.trace.prompts import LoggedPrompt
from canopy_lab.trace.session_request import SessionRequest
from sglang_canopy.errors import CanopyError

_MISSING = "lack what the agent does not write down: its tools, and Claude Code's system prompt"
_CODEX_KINDS = ("session_meta", "response_item", "turn_context", "event_msg", "compacted")


def is_session(entry: dict[str, Any]) -> bool:
    """Return whether an entry is from a session file."""
    if entry.get("type") in _CODEX_KINDS and isinstance(entry.get("payload"), dict):
        return True
    named = "sessionId" in entry and ("uuid" in entry or "message" in entry or "snapshot" in entry)
    return named or (entry.get("type") == "summary" and "leafUuid" in entry)


def prompts(path: Path, tolerance: lines.Tolerance) -> Iterator[LoggedPrompt]:
    """Yield the requests of the sessions by time. Memory: the sessions active at one time."""
    seen = tolerance.understood
    known: set[str] = set()
    for request in _by_time(path, tolerance):
        if request.name in known:
            # A resumed session begins with a copy of the earlier one.
            seen.left_out[calls.TWICE] += 1
            continue
        if request.name:
            known.add(request.name)
        prompt = _prompt(request)
        seen.changed[_MISSING] += 1
        seen.count_model(request.model)
        for part in prompt.parts:
            seen.role_bytes[part.role or "no role"] += len(part.text)
        yield prompt


def _prompt(request: SessionRequest) -> LoggedPrompt:
    made = chat(request.messages, [{"system": request.system}])
    return LoggedPrompt(
        request.time_s,
        request.line,
        made.text,
        parts=made.parts,
        conversation=request.session,
        category="agent" if request.parent is None else "subagent",
        turn=request.turn,
        stop=usage.STOPS.get(request.stop),
        output_tokens=request.output_tokens,
        apart=(request.model,),
    )


def _by_time(path: Path, tolerance: lines.Tolerance) -> Iterator[SessionRequest]:
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise CanopyError(f"folder {str(path)!r} holds no session (.jsonl)")
    starts = sorted((_first_time(file), at, file) for at, file in enumerate(files))
    running: list[tuple[float, int, SessionRequest, Iterator[SessionRequest]]] = []
    for start, at, file in [*starts, (float("inf"), len(starts), path)]:
        while running and running[0][0] <= start:
            _, tie, request, rest = heapq.heappop(running)
            yield request
            after = next(rest, None)
            if after is not None:
                heapq.heappush(running, (after.time_s, tie, after, rest))
        if start < float("inf"):
            requests = _requests(file, tolerance)
            first = next(requests, None)
            if first is not None:
                heapq.heappush(running, (first.time_s, at, first, requests))


def _first_time(file: Path) -> float:
    """Return the time of a file's first entry with a time; infinite without one."""
    for _, text in lines.read_lines(file):
        try:
            return fields.seconds(lines.parse_object(text).get("timestamp"))
        except lines.BadLine:
            continue
    return float("inf")


def _requests(file: Path, tolerance: lines.Tolerance) -> Iterator[SessionRequest]:
    claude, codex = ClaudeSessions(), CodexSession(file.stem)
    for line, text in lines.read_lines(file):
        try:
            entry = lines.parse_object(text)
            is_codex = entry.get("type") in _CODEX_KINDS and "payload" in entry
            found = codex.take(entry, line) if is_codex else claude.take(entry, line)
        except lines.BadLine as error:
            tolerance.bad(line, error, where="" if file == tolerance.path else file.name)
            continue
        if found == calls.FAILED:
            tolerance.understood.left_out[calls.FAILED] += 1
        elif isinstance(found, SessionRequest):
            yield found
