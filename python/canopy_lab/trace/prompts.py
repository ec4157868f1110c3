"""Prompts of text logs, and their conversion to trace records: cut into blocks and sorted by time.

A text is cut by a local tokenizer; without one, every four bytes of UTF-8 count as a token. Equal
texts give equal blocks either way. Only ids of blocks are passed on, no text.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any

from canopy_lab.trace.chat import PromptPart
from canopy_lab.trace.infer import ConversationIndex
from canopy_lab.trace.lines import BadLine, TimeOrder, Tolerance
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError

BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 4
ORDER_WINDOW = 4096
"""Requests held back for sorting: logs are written when an answer ends."""

_ID_BYTES = array("q").itemsize


@dataclass(slots=True)
class LoggedPrompt:
    """One request of a text log."""

    time_s: float
    """Seconds since 1970, or since the start of a log without dates."""
    line: int
    text: str = ""
    token_ids: list[int] | None = None
    """Token ids instead of ``text``, if the log has them."""
    parts: tuple[PromptPart, ...] = ()
    """Messages and tools whose texts form ``text``; empty for a prompt without messages."""
    conversation: str | None = None
    user: str | None = None
    category: str = "default"
    turn: int | None = None
    """Turn number; ``None`` if it is not logged."""
    stop: str | None = None
    output_tokens: int = 0
    logged_tokens: int | None = None
    """Prompt tokens as counted by the log's server."""
    salts: tuple[str, ...] = ()
    """Values that separate prompts (model, adapter, tenant): different values share no KV."""

    def count_tokens(self) -> int:
        if self.token_ids is not None:
            return len(self.token_ids)
        return -(-len(self.text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


class Cutter:
    """Cuts prompts into chained blocks, by ``tokenizer`` or by bytes: (block ids, tokens)."""

    def __init__(self, tokenizer: str | Path | None = None) -> None:
        self._tokenizer = None if tokenizer is None else _load_tokenizer(Path(tokenizer))
        self.method = (
            f"{BYTES_PER_TOKEN} bytes of UTF-8 count as a token"
            if tokenizer is None
            else f"tokenised by {Path(tokenizer).name}"
        )

    def __call__(self, prompt: LoggedPrompt) -> tuple[tuple[int, ...], int]:
        ids, salt = prompt.token_ids, salt_of(*prompt.salts)
        if ids is None and self._tokenizer is not None:
            ids = self._tokenizer.encode(prompt.text, add_special_tokens=False).ids
        if ids is not None:
            return chain_ids(array("q", ids).tobytes(), BLOCK_TOKENS * _ID_BYTES, salt), len(ids)
        raw = prompt.text.encode("utf-8", "surrogatepass")
        return chain_ids(raw, BLOCK_TOKENS * BYTES_PER_TOKEN, salt), -(-len(raw) // BYTES_PER_TOKEN)


def escape_name(name: Any) -> str:
    """Replace the slashes in a conversation's name: a trace names a sub-agent ``parent/child``."""
    return str(name).replace("/", "|")


def salt_of(*salts: Any) -> bytes:
    """Return 8 bytes that differ if ``salts`` differ; empty if all values are."""
    if not any(salts):
        return b""
    return blake2b(repr(salts).encode(errors="surrogatepass"), digest_size=8).digest()


def chain_ids(raw: bytes, block_bytes: int, salt: bytes = b"") -> tuple[int, ...]:
    """Return the ids (63 bits) of the blocks of ``raw``, including a partial last block. Blocks have
    equal ids if their prefixes and ``salt`` (64 bytes at most) are equal."""
    ids, digest = [], salt
    for start in range(0, len(raw), block_bytes):
        digest = blake2b(raw[start : start + block_bytes], digest_size=8, key=digest).digest()
        ids.append(int.from_bytes(digest, "little") >> 1)
    return tuple(ids)


def merge_blocks(blocks: tuple[int, ...], factor: int) -> tuple[int, ...]:
    """Return the ids of blocks ``factor`` times as long. An id represents its whole prefix."""
    if factor == 1:
        return blocks
    whole = blocks[factor - 1 :: factor]
    return (*whole, blocks[-1]) if len(blocks) % factor else whole


def reorder(trace: Iterable[TraceRequest], window: int = ORDER_WINDOW) -> Iterator[TraceRequest]:
    """Yield the requests in order of time, if each is at most ``window`` requests late."""
    heap: list[tuple[float, int, TraceRequest]] = []
    ordinals = count()
    for request in trace:
        heapq.heappush(heap, (request.time_s, next(ordinals), request))
        if len(heap) > window:
            yield heapq.heappop(heap)[2]
    while heap:
        yield heapq.heappop(heap)[2]


def to_record(prompt: LoggedPrompt, cutter: Cutter) -> TraceRequest:
    """Convert a prompt to a trace record with the log's own time."""
    blocks, tokens = cutter(prompt)
    return TraceRequest(
        prompt.time_s,
        tokens,
        prompt.output_tokens,
        blocks,
        BLOCK_TOKENS,
        category=prompt.category,
        turn=prompt.turn or 0,
        conversation=prompt.conversation,
        stop=prompt.stop,
        user=prompt.user,
        line=prompt.line,
    )


def with_conversation(request: TraceRequest, conversations: ConversationIndex) -> TraceRequest:
    """Return the request with a conversation and a turn, inferred from its blocks if it has none."""
    if request.conversation is not None and request.turn:
        return request
    number, turn, _ = conversations.add(request.blocks, request.input_tokens, request.block_tokens)
    return copy_with(
        request, conversation=request.conversation or f"#{number}", turn=request.turn or turn
    )


def copy_with(request: TraceRequest, **fields: Any) -> TraceRequest:
    """Return a copy with other ``fields``; several times as fast as ``dataclasses.replace``."""
    values = {name: getattr(request, name) for name in _FIELDS}
    values.update(fields)
    return TraceRequest(**values)


_FIELDS = tuple(TraceRequest.__slots__)


def to_trace(
    prompts: Iterable[LoggedPrompt], tolerance: Tolerance, cutter: Cutter
) -> Iterator[TraceRequest]:
    """Yield trace records by time, from 0. A prompt later than the window is a broken line."""
    conversations = ConversationIndex()
    for request in shift_to_zero((to_record(prompt, cutter) for prompt in prompts), tolerance):
        yield with_conversation(request, conversations)


def shift_to_zero(requests: Iterable[TraceRequest], tolerance: Tolerance) -> Iterator[TraceRequest]:
    """Yield the requests in order of time, starting at 0.

    A request more than ``ORDER_WINDOW`` requests late is a broken line of ``tolerance``.
    """
    start_s, time_order = None, TimeOrder()
    for request in reorder(requests):
        start_s = request.time_s if start_s is None else start_s
        try:
            time_s = time_order.check(request.time_s - start_s)
        except BadLine as error:
            tolerance.count_bad(request.line, str(error))
            continue
        yield copy_with(request, time_s=time_s)


def make_decoder(tokenizer: str | Path | None) -> Callable[[list[int]], str] | None:
    """Return a function from token ids to text, or ``None``. Raises ``CanopyError``."""
    if tokenizer is None:
        return None
    loaded = _load_tokenizer(Path(tokenizer))
    return lambda ids: str(loaded.decode(ids, skip_special_tokens=False))


def _load_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CanopyError(
            "--tokenizer needs the package tokenizers: pip install tokenizers, or leave it out "
            f"({BYTES_PER_TOKEN} bytes then count as a token)"
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise CanopyError(
            f"cannot read a tokenizer from {str(file)!r} ({error}); give a tokenizer.json of "
            "Hugging Face, or a folder that has one"
        ) from None
