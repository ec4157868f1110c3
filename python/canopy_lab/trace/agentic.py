"""Agentic coding conversations (the ``kv-cache-tester`` format) and overlays of them.

The reader accepts three kinds of files and distinguishes them by content:

- one conversation, a JSON object: ``block_size``, and ``requests[{t, in, out, hash_ids, stop,
  ...}]``, among them sub-agents (``type: "subagent"``) with a start ``t`` and ``requests`` of
  their own, timed from it;
- a tar archive (compressed or not) or a folder of such files. They have no common clock, so they
  are read in archive order, and each starts when the previous one ends;
  ``benchmark/traces/make_overlay.py`` makes them run side by side;
- an overlay: JSON lines, one request each, with the fields of a request (``t``, ``in``, ``out``,
  ``hash_ids``, ``stop``, ``think_time``, ``api_time``, ``model``)
  plus ``block_size``, ``tool_tokens``, ``system_tokens``, ``conversation``, ``turn``, ``category`` and
  ``user`` (the archive's file, which parent and sub-agents share).

Conversations and sub-agents have the numbers of tokens of their tools (``tool_tokens``) and system
prompts (``system_tokens``). Prompts begin with the tools, then the system prompt.

``hash_ids`` are prefix-chained and cover full blocks only: the rest of a prompt, less than a
block, has no id. They are local to a file, so the reader renumbers them file by file. With
``hash_id_scope: global`` they are valid in all files of one ``source`` (a user), and sessions keep
the blocks that they share.
"""

from __future__ import annotations

import heapq
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.record import STOPS, TraceRequest
from sglang_canopy.errors import CanopyError

_IDS_PER_SOURCE = 1 << 40
"""Block ids of one source."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One file: its requests sorted by time (seconds from its start), block ids from 0 or 1."""

    name: str
    requests: tuple[TraceRequest, ...]
    max_block_id: int
    """Maximum block id used."""
    source: str | None = None
    """Name shared by files that number their blocks together; ``None`` for separate numbers."""


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the requests of a conversation, an archive or an overlay."""
    if path.is_dir() or is_archive(path) or path.suffix == ".json":
        yield from _read_end_to_end(conversations(path, tolerance))
        return
    time_order, ids = lines.TimeOrder(), SharedIds()
    end_s, next_id = 0.0, 0
    for line, text in lines.read_lines(path):
        try:
            record = lines.parse_object(text)
            if "requests" in record:
                conversation = parse_conversation(record, f"line {line}", line)
                yield from _shift_all(conversation, end_s, ids.first_id(conversation, next_id))
                end_s, next_id = _next_offsets(conversation, end_s, next_id)
                continue
            request = _parse_overlay_line(record, line)
            time_order.check(request.time_s)
        except lines.BadLine as error:
            tolerance.count_bad(line, error)
            continue
        yield request


def is_archive(path: Path) -> bool:
    file_name = path.name.lower()
    return file_name.endswith((".tar", ".tgz", ".txz")) or any(
        file_name.endswith(".tar" + suffix) for suffix in lines.COMPRESSED
    )


def conversations(path: Path, tolerance: lines.Tolerance) -> Iterator[Conversation]:
    """Yield the conversations of an archive, a folder or one file, one in memory at a time.

    A broken file counts as one broken line of ``tolerance``.
    """
    for ordinal, (name, text) in enumerate(conversation_files(path), 1):
        try:
            yield parse_conversation(lines.parse_object(text), name, ordinal)
        except lines.BadLine as error:
            tolerance.count_bad(ordinal, str(error), name=name)


def conversation_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and text of every conversation file of an archive, a folder or one file."""
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise CanopyError(f"folder {str(path)!r} holds no .json file of a conversation")
        for file in files:
            yield file.stem, file.read_bytes()
    elif is_archive(path):
        try:
            with lines.open_binary(path) as raw, tarfile.open(fileobj=raw, mode="r|*") as archive:
                for member in archive:
                    stream = archive.extractfile(member) if member.isfile() else None
                    if stream is not None and member.name.endswith(".json"):
                        yield PurePosixPath(member.name).stem, stream.read()
        except tarfile.TarError as error:
            raise CanopyError(f"cannot read archive {str(path)!r}: {error}") from None
    else:
        with lines.open_binary(path) as raw:
            yield path.stem, raw.read()


def parse_conversation(record: dict[str, Any], name: str, ordinal: int) -> Conversation:
    """Parse a conversation file. ``ordinal`` becomes the requests' ``line``. Raises ``BadLine``."""
    block_tokens = lines.count(record, "block_size", minimum=1)
    identity = record.get("id")
    name = identity if isinstance(identity, str) and identity else name
    agent = _Agent(name, name, block_tokens, ordinal, "agent", *_head_tokens(record))
    agents = _parse_agents(record.get("requests"), agent, 0.0)
    # JSON creates an int object for every number; a long conversation repeats each dozens of times.
    intern_id = {}.setdefault  # type: ignore[var-annotated]
    requests = tuple(
        replace(r, blocks=tuple(map(intern_id, r.blocks, r.blocks)))
        for r in heapq.merge(*agents, key=lambda r: r.time_s)
    )
    if not requests:
        raise lines.BadLine("'requests' is empty")
    max_block_id = max((max(r.blocks, default=0) for r in requests), default=0)
    return Conversation(name, requests, max_block_id, _parse_source(record))


def _parse_source(record: dict[str, Any]) -> str | None:
    """Return the source that numbers the block ids; ``None``: the file itself. Raises ``BadLine``."""
    scope = record.get("hash_id_scope")
    if scope in (None, "local"):
        return None
    if scope != "global":
        raise lines.BadLine(f"'hash_id_scope' must be local or global, got {scope!r:.40}")
    source = record.get("source")
    if not isinstance(source, str) or not source:
        raise lines.BadLine(
            "'hash_id_scope' is global and no 'source' says in which files: in published sets the "
            "numbers begin again with each user, so equal numbers are not equal blocks; give each file "
            "its user as 'source'"
        )
    return source


@dataclass(frozen=True, slots=True)
class _Agent:
    """Fields that all requests of an agent share."""

    conversation: str | None
    user: str | None
    block_tokens: int
    line: int
    category: str
    tool_tokens: int
    system_tokens: int


def _head_tokens(record: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of the tools and of the system prompt; 0 if the record lacks them."""
    names = ("tool_tokens", "system_tokens")
    tools, system = (0 if record.get(name) is None else lines.count(record, name) for name in names)
    return tools, system


def _parse_agents(entries: Any, agent: _Agent, start_s: float) -> list[list[TraceRequest]]:
    """Return the requests of one agent and, as separate lists, of its sub-agents."""
    if not isinstance(entries, list):
        raise lines.BadLine("'requests' must be a list")
    own_requests: list[TraceRequest] = []
    sub_agents: list[list[TraceRequest]] = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise lines.BadLine("an entry of 'requests' is not an object")
        time_s = start_s + lines.number(entry, "t")
        if "requests" in entry:
            tool_tokens, system_tokens = _head_tokens(entry)
            child = replace(
                agent,
                conversation=f"{agent.conversation}/{entry.get('agent_id') or len(sub_agents) + 1}",
                category="subagent",
                tool_tokens=tool_tokens,
                system_tokens=system_tokens,
            )
            sub_agents += _parse_agents(entry["requests"], child, time_s)
            continue
        own_requests.append(_parse_request(entry, time_s, len(own_requests) + 1, agent))
    own_requests.sort(key=lambda r: r.time_s)
    return [own_requests, *sub_agents]


def _parse_request(entry: dict[str, Any], time_s: float, turn: int, agent: _Agent) -> TraceRequest:
    tokens, block_tokens = lines.count(entry, "in"), agent.block_tokens
    blocks = lines.block_ids(entry)
    if len(blocks) > -(-tokens // block_tokens):
        raise lines.BadLine(
            f"'hash_ids' has {len(blocks)} blocks of {block_tokens} tokens, "
            f"more than {tokens} tokens fill"
        )
    stop, model = entry.get("stop"), entry.get("model")
    return TraceRequest(
        time_s, tokens, lines.count(entry, "out"), blocks, block_tokens,
        category=agent.category, turn=turn, conversation=agent.conversation,
        stop=STOPS.get(stop) if isinstance(stop, str) else None, user=agent.user,
        think_s=_optional_seconds(entry, "think_time"), answer_s=_optional_seconds(entry, "api_time"),
        model=model if isinstance(model, str) and model else None,
        tool_tokens=agent.tool_tokens, system_tokens=agent.system_tokens, line=agent.line,
    )  # fmt: skip


def _optional_seconds(entry: dict[str, Any], name: str) -> float | None:
    return lines.number(entry, name) if entry.get(name) is not None else None


def _parse_overlay_line(record: dict[str, Any], line: int) -> TraceRequest:
    for key in ("conversation", "user", "category"):
        if not isinstance(record.get(key, ""), str):
            raise lines.BadLine(f"{key!r} must be a string, got {record[key]!r}")
    agent = _Agent(
        record.get("conversation"),
        record.get("user"),
        lines.count(record, "block_size", minimum=1),
        line,
        record.get("category", "agent"),
        *_head_tokens(record),
    )
    turn = lines.count(record, "turn", minimum=1) if "turn" in record else 1
    return _parse_request(record, lines.number(record, "t"), turn, agent)


def shift(request: TraceRequest, start_s: float, first_id: int, suffix: str = "") -> TraceRequest:
    """Return ``request`` started at ``start_s``, with its block ids increased by ``first_id``.

    ``suffix`` is appended to the names of conversation and user.
    """
    return replace(
        request,
        # A nanosecond is far below the traces' own resolution, and prints the same everywhere.
        time_s=round(request.time_s + start_s, 9),
        blocks=tuple([b + first_id for b in request.blocks]) if first_id else request.blocks,
        conversation=None if request.conversation is None else request.conversation + suffix,
        user=None if request.user is None else request.user + suffix,
    )


def _shift_all(conversation: Conversation, start_s: float, first_id: int) -> Iterator[TraceRequest]:
    return (shift(r, start_s, first_id) for r in conversation.requests)


def _next_offsets(conversation: Conversation, start_s: float, first_id: int) -> tuple[float, int]:
    own_ids = 0 if conversation.source else conversation.max_block_id + 1
    return start_s + conversation.requests[-1].time_s, first_id + own_ids


class SharedIds:
    """Gives the block ids of each source their own range, above the ids of single files."""

    def __init__(self) -> None:
        self._range_numbers: dict[str, int] = {}

    def first_id(self, conversation: Conversation, next_id: int) -> int:
        """Return the offset of the conversation's ids; ``next_id`` if they are valid in its file only.

        Raises ``CanopyError`` for ids that do not fit a range.
        """
        if conversation.source is None:
            return next_id
        if conversation.max_block_id >= _IDS_PER_SOURCE:
            raise CanopyError(
                f"block ids of source {conversation.source!r} go up to {conversation.max_block_id}; "
                f"global ids must be below {_IDS_PER_SOURCE}"
            )
        number = self._range_numbers.setdefault(conversation.source, len(self._range_numbers) + 1)
        return number * _IDS_PER_SOURCE


def _read_end_to_end(conversations: Iterable[Conversation]) -> Iterator[TraceRequest]:
    start_s, first_id, ids = 0.0, 0, SharedIds()
    for conversation in conversations:
        yield from _shift_all(conversation, start_s, ids.first_id(conversation, first_id))
        start_s, first_id = _next_offsets(conversation, start_s, first_id)
