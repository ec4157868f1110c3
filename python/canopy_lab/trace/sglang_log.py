"""SGLang's own request logs.

Written by a server started with ``--log-requests --log-requests-level 3 --log-requests-format
json`` (to stdout, or into a folder with ``--log-requests-target``). Other lines of the server's
log are ignored. A request appears twice, when it is received and when it is finished; it is
yielded in order of arrival once its end is known, so memory is that of the requests in flight
plus, where clients name no conversation, the inference's O(distinct blocks).

Prompts are token ids in the log (chat, or ``input_ids``), hashed here into chained blocks of 16
tokens. A prompt logged as text only (``/v1/completions``, ``text``) is cut into blocks of 64
characters and its length is estimated as 4 characters a token: equal texts still mean equal blocks.
Prompts of two tenants or adapters share no block, as they share no KV.
"""

from __future__ import annotations

import datetime
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.infer import ConversationIndex
from canopy_lab.trace.prompts import chained
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.tenant import namespace_of

BLOCK_TOKENS = 16
CHARACTERS_A_TOKEN = 4
SERVER_BLOCK_TOKENS = 64
"""A server's ``block_tokens`` where its configuration does not name another."""
HOW_TO_LOG = "--log-requests --log-requests-level 3 --log-requests-format json"

WARM_UP_TEXT = "The capital city of France is"
"""What SGLang asks itself before it takes requests (``http_server.py``, ``_execute_server_warmup``)."""

_POOL = re.compile(rb"\bmax_total_num_tokens=(\d{1,15})\b")
_FLUSHED = b"Cache flushed successfully!"
"""``scheduler.py``, ``flush_cache``."""

_STOPS = {"length": "length", "stop": "end", "tool_calls": "tool"}


@dataclass(slots=True)
class _Flight:
    """A request that was received; ``end`` is its finished event, once there."""

    time_s: float
    line: int
    end: dict[str, Any] | None = None


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the finished requests of ``path`` in order of arrival."""
    yield from _read(path, _Reader(path, tolerance))


def read_as_server(
    path: Path | str, *, block_tokens: int = SERVER_BLOCK_TOKENS, skip_bad: int = 0
) -> Iterator[TraceRequest]:
    """Yield them with the block ids that a server itself makes of tokens and salts.

    Those of ``radix/live_request.py``: whole blocks only, of ``block_tokens`` (the server's own setting
    of that name), chained xxh3 seeded by the request's salts. A plan made from these names
    subtrees that the server knows. A prompt logged as text only, or of a LoRA adapter, whose salt
    the log lacks, gets ids that no server makes: it counts as traffic, and a TTL of its subtree
    would wait for nobody. Raises ``CanopyError``.
    """
    source = lines.existing(path)
    tolerance = lines.Tolerance(source, skip_bad)
    cut = partial(_server_blocks, block_tokens=block_tokens)
    yield from _read(source, _Reader(source, tolerance, cut, block_tokens))
    tolerance.report()


def logs_tokens(path: Path | str) -> bool:
    """Whether a prompt of the log has ids that a server makes: token ids, of no adapter."""
    for _, text in lines.read_lines(lines.existing(path)):
        begin = text.find(b'{"timestamp"')
        if begin < 0 or b'"event": "request.finished"' not in text:
            continue
        try:
            given = _mapping(lines.parse_object(text[begin:]), "obj")
            if _token_ids(given) and not _adapter(given):
                return True
        except lines.BadLine:
            continue
    return False


def pool_tokens(path: Path | str) -> int | None:
    """The device's KV pool in tokens, as the scheduler says it when it starts; the last one of a
    log of several starts. ``None`` where the log does not say."""
    found = None
    for _, text in lines.read_lines(lines.existing(path)):
        said = None if b'{"timestamp"' in text else _POOL.search(text)
        if said is not None:
            found = int(said[1])
    return found


def last_flush(path: Path | str) -> int:
    """The line on which a scheduler last said that it had emptied its cache (``/flush_cache``, an
    update of the weights); 0 where none did. Nothing runs then: later lines are of later requests.
    Raises ``CanopyError``."""
    found = 0
    for line, text in lines.read_lines(lines.existing(path)):
        if _FLUSHED in text and b'{"timestamp"' not in text:
            found = line
    return found


def _read(path: Path, reader: _Reader) -> Iterator[TraceRequest]:
    tolerance = reader.tolerance
    for line, text in lines.read_lines(path):
        try:
            reader.take(line, text)
        except lines.BadLine as error:
            tolerance.bad(line, str(error))
        yield from reader.ready()
    yield from reader.rest()
    if reader.texts:
        lines.log.warning(
            "%s: %d prompts were logged as text, so their lengths are estimated (%d characters a token)",
            path, reader.texts, CHARACTERS_A_TOKEN,
        )  # fmt: skip
    if reader.seen == 0:
        raise CanopyError(
            f"{str(path)!r} holds no request in JSON; start the server with {HOW_TO_LOG}"
        )


class _Reader:
    def __init__(
        self,
        path: Path,
        tolerance: lines.Tolerance,
        cut: Callable[[Mapping[str, Any]], tuple[tuple[int, ...], int]] | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.path, self.tolerance = path, tolerance
        self._cut, self._block_tokens = cut or _blocks, block_tokens
        self.seen = self.texts = 0
        self._flying: OrderedDict[str, _Flight] = OrderedDict()
        self._start: datetime.datetime | None = None
        self._last_s = 0.0
        self._index = ConversationIndex()

    def take(self, line: int, text: bytes) -> None:
        begin = text.find(b'{"timestamp"')
        if begin < 0 or b'"event": "request.' not in text:
            if b"Receive: obj=" in text:
                raise lines.BadLine(f"the log is in text form; start the server with {HOW_TO_LOG}")
            return
        event = lines.parse_object(text[begin:])
        if event.get("event") == "request.received":
            self.seen += 1
            for rid in _ids(event):
                self._flying[rid] = _Flight(self._time(event), line)
        elif event.get("event") == "request.finished":
            self.seen += 1
            for rid in _ids(event):
                flight = self._flying.get(rid)
                if flight is None:
                    # The log begins after this one was received.
                    meta = _mapping(_mapping(event, "out"), "meta_info")
                    waited = meta.get("e2e_latency")
                    waited = waited if isinstance(waited, (int, float)) else 0.0
                    flight = self._flying[rid] = _Flight(self._time(event) - waited, line)
                flight.end, flight.line = event, line

    def ready(self) -> Iterator[TraceRequest]:
        """What can be yielded: the oldest requests, up to the first still running."""
        while self._flying and next(iter(self._flying.values())).end is not None:
            _, flight = self._flying.popitem(last=False)
            yield from self._finish(flight)

    def rest(self) -> Iterator[TraceRequest]:
        """At the end of the log: the finished ones among those still running."""
        lost = 0
        for flight in self._flying.values():
            if flight.end is None:
                lost += 1
            else:
                yield from self._finish(flight)
        self._flying.clear()
        if lost:
            lines.log.warning("%s: %d requests never finished, left out", self.path, lost)

    def _finish(self, flight: _Flight) -> Iterator[TraceRequest]:
        assert flight.end is not None
        if _is_warm_up(_mapping(flight.end, "obj")):
            return
        try:
            yield self._request(flight, flight.end)
        except lines.BadLine as error:
            self.tolerance.bad(flight.line, str(error))

    def _request(self, flight: _Flight, end: dict[str, Any]) -> TraceRequest:
        given = _mapping(end, "obj")
        meta = _mapping(_mapping(end, "out"), "meta_info")
        blocks, tokens = self._cut(given)
        self.texts += not _token_ids(given)
        custom = _mapping(_mapping(given, "sampling_params"), "custom_params")
        conversation, turn, _ = self._index.add(blocks, tokens, self._block_tokens)
        named = custom.get("canopy_conversation") or given.get("session_id")
        said_turn, stop = custom.get("canopy_turn"), custom.get("canopy_stop")
        reason = _mapping(meta, "finish_reason").get("type")
        # Requests without a received event may come late; a trace never goes back.
        self._last_s = max(self._last_s, flight.time_s)
        return TraceRequest(
            self._last_s,
            tokens,
            lines.count(dict(meta), "completion_tokens"),
            blocks,
            self._block_tokens,
            category=str(custom.get("canopy_category") or "default"),
            turn=said_turn if type(said_turn) is int and said_turn > 0 else turn,
            conversation=str(named) if named else str(conversation),
            stop=str(stop) if stop else _STOPS.get(str(reason)),
            line=flight.line,
        )

    def _time(self, event: Mapping[str, Any]) -> float:
        stamp = event.get("timestamp")
        try:
            when = datetime.datetime.fromisoformat(str(stamp))
        except ValueError:
            raise lines.BadLine(f"'timestamp' must be a date and time, got {stamp!r}") from None
        self._start = self._start or when
        return (when - self._start).total_seconds()


def _ids(event: Mapping[str, Any]) -> list[str]:
    rid = event.get("rid")
    return [str(r) for r in rid] if isinstance(rid, list) else [str(rid)]


def _mapping(of: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = of.get(key)
    return value if isinstance(value, dict) else {}


def _is_warm_up(given: Mapping[str, Any]) -> bool:
    """Whether the server sent this request to itself at its start."""
    text = given.get("text")
    texts = text if isinstance(text, list) else [text]
    return bool(texts) and all(t == WARM_UP_TEXT for t in texts) and not _token_ids(given)


def _blocks(
    given: Mapping[str, Any], block_tokens: int = BLOCK_TOKENS
) -> tuple[tuple[int, ...], int]:
    """Chained block ids of a logged prompt, and its length in tokens."""
    ids, text = _token_ids(given), given.get("text")
    if ids:
        raw, token_bytes, tokens = array("q", ids).tobytes(), array("q").itemsize, len(ids)
    elif isinstance(text, str) and text:
        raw, token_bytes = text.encode("utf-32-le"), CHARACTERS_A_TOKEN * 4
        tokens = -(-len(text) // CHARACTERS_A_TOKEN)
    else:
        raise lines.BadLine(f"the prompt was not logged; start the server with {HOW_TO_LOG}")
    return chained(raw, block_tokens * token_bytes, _salt(given)), tokens


def _salt(given: Mapping[str, Any]) -> bytes:
    """Differs for prompts that share no KV; empty without tenant and adapter."""
    said = [given.get(name) or "" for name in ("extra_key", "cache_salt")]
    adapter = _adapter(given) or ""
    if not any([adapter, *said]):
        return b""
    return blake2b(repr((adapter, *said)).encode(errors="surrogatepass"), digest_size=8).digest()


def _adapter(given: Mapping[str, Any]) -> Any:
    return given.get("lora_id") or given.get("lora_path")


def _token_ids(given: Mapping[str, Any]) -> list[int]:
    """Token ids of a logged prompt; empty where it is logged as text."""
    ids = given.get("input_ids")
    if not isinstance(ids, list):
        return []
    if not set(map(type, ids)) <= {int}:
        raise lines.BadLine(
            f"the prompt's token ids are shortened or nested; start the server with {HOW_TO_LOG}"
            " and send one prompt a request"
        )
    return ids


def _server_blocks(given: Mapping[str, Any], block_tokens: int) -> tuple[tuple[int, ...], int]:
    """The same as the server hashes it: ``radix/live_request.py``, ``live_request`` and ``_extend``."""
    try:
        import xxhash
    except ImportError:
        raise CanopyError(
            "the ids of a server are made with xxhash, which is not installed; "
            "run: pip install xxhash"
        ) from None
    ids = _token_ids(given)
    if not ids or _adapter(given):
        blocks, tokens = _blocks(given, block_tokens)
        return blocks[: tokens // block_tokens], tokens
    namespace = namespace_of(given.get("extra_key"), given.get("cache_salt"))
    data = memoryview(array("q", ids)).cast("B")
    width = array("q").itemsize * block_tokens
    chain = xxhash.xxh3_64_intdigest(namespace)
    made = []
    for start in range(0, len(data) - width + 1, width):
        chain = xxhash.xxh3_64_intdigest(data[start : start + width], seed=chain)
        made.append(chain)
    return tuple(made), len(ids)
