"""Prompts of SGLang's request log, cut into chained blocks.

Token ids are cut by count. A prompt logged as text only (``/v1/completions``, chats with images) is cut
by characters: equal texts have equal blocks, and the length is an estimate from the log's own counts
(``characters_per_token``). Prompts of different tenants or adapters share no block, as they share no KV.
Prompts with images share the blocks before the first different image.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.prompts import chain_ids, salt_of
from sglang_canopy.errors import CanopyError
from sglang_canopy.tenant import tenant_namespace

BLOCK_TOKENS = 16
SERVER_BLOCK_TOKENS = 64
"""Default of a server's ``block_tokens``."""
HOW_TO_LOG = "--log-requests --log-requests-level 3 --log-requests-format json"

_EVENT_NAME = re.compile(rb'"event": ?"(request\.[a-z.]+)"')
_NESTED_EVENT = re.compile(rb'\\"event\\": ?\\"request\.')
"""An event inside a text of another object."""
_COLOUR_RESET = b"\x1b[0m"
_CHARACTERS_PER_TOKEN = 4.0
_MAX_HEAD_LINES = 10_000
"""Maximum lines read to estimate the characters per token."""
_CUT_CHARACTERS = 1024
"""Characters at each end of a text that ``request_logger.py`` logs at levels below 3."""
_MAX_TOKEN_ID = 1 << 63
"""Upper bound of token ids."""
_MEDIA_FIELDS = ("image_data", "video_data", "audio_data")
_PLACEHOLDER = re.compile(r"(?:<[^<>]{0,40}(?:image|img|vision|video|audio)[^<>]{0,40}>)+", re.I)
"""An image's placeholder in a prompt, in the chat templates of many models."""


def is_event(text: bytes) -> bool:
    """Return whether a line holds a request: its words are a client's, not the server's."""
    return _EVENT_NAME.search(text) is not None


def event_of(text: bytes, names: tuple[str, ...]) -> dict[str, Any] | None:
    """Return a line's event if its name is in ``names``, else ``None``. Raises ``BadLine``."""
    name = _EVENT_NAME.search(text)
    if name is None and _NESTED_EVENT.search(text):
        raise _unknown_wrapping(lines.parse_object(text))
    if name is None or name[1].decode() not in names:
        return None
    text = text.replace(_COLOUR_RESET, b"")  # a coloured line
    event = lines.parse_object(text[max(text.find(b"{"), 0) :])
    if "event" not in event:
        raise _unknown_wrapping(event)
    return event


def _unknown_wrapping(entry: Mapping[str, Any]) -> lines.BadLine:
    return lines.BadLine(
        f"the request is inside an object with the fields {', '.join(sorted(entry))[:200]}, a wrapping that "
        "is not known; give the server's own lines"
    )


def object_in(outer: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return ``outer[key1][key2]...``; empty if a value is not an object."""
    value: Any = outer
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def characters_per_token(path: Path) -> float:
    """Return the characters per token of prompts that are logged as text, by the server's counts.

    A multiple of 1/16, so that blocks have whole characters; 4 if the log has no counts.
    """
    characters = tokens = 0
    for _, line in islice(lines.read_lines(path), _MAX_HEAD_LINES):
        if b'"input_ids": null' not in line and b'"input_ids":null' not in line:
            continue
        try:
            event = event_of(line, ("request.finished",)) or {}
        except lines.BadLine:
            continue
        logged, meta = object_in(event, "obj"), object_in(event, "out", "meta_info")
        count = meta.get("prompt_tokens")
        text = logged.get("text")
        if isinstance(text, str) and type(count) is int and count > 1 and not media_ids(logged):
            characters, tokens = characters + len(text), tokens + count
    estimate = characters / tokens if tokens else _CHARACTERS_PER_TOKEN
    return max(1, round(BLOCK_TOKENS * estimate)) / BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PromptCutter:
    """Cuts a request's ``obj`` into blocks of ``block_tokens``, a multiple of 16.

    ``as_server``: use the ids that a server makes from tokens and salts.
    """

    block_tokens: int = BLOCK_TOKENS
    characters_per_token: float = _CHARACTERS_PER_TOKEN
    as_server: bool = False

    def __call__(self, logged: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
        """Return the chained block ids, and the prompt's length in tokens. Raises ``BadLine``."""
        if self.as_server and has_server_ids(logged):
            return _server_blocks(logged, self.block_tokens)
        blocks, tokens = self._blocks(logged)
        return blocks[: tokens // self.block_tokens] if self.as_server else blocks, tokens

    def _blocks(self, logged: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
        ids, media = token_ids(logged), media_ids(logged)
        if ids:
            # The position of an image among the ids is unknown, so all ids count as following the
            # first image.
            raw, block_bytes = array("q", ids).tobytes(), self.block_tokens * array("q").itemsize
            return chain_ids(raw, block_bytes, _salt(logged, media[:1])), len(ids)
        text = _mark_images(_prompt_text(logged), media)
        block_bytes = round(self.block_tokens * self.characters_per_token) * 4
        tokens = -(-len(text) // self.characters_per_token)
        raw = text.encode("utf-32-le", "surrogatepass")
        return chain_ids(raw, block_bytes, _salt(logged)), int(tokens)


def token_ids(logged: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a logged prompt; empty if it is logged as text. Raises ``BadLine``."""
    ids = logged.get("input_ids")
    if not isinstance(ids, list):
        return []
    if not set(map(type, ids)) <= {int} or (
        ids and not -_MAX_TOKEN_ID <= min(ids) <= max(ids) < _MAX_TOKEN_ID
    ):
        raise lines.BadLine(
            f"the prompt's token ids are shortened or nested, or no ids; start the server with {HOW_TO_LOG}"
            " and send one prompt a request"
        )
    return ids


def has_server_ids(logged: Mapping[str, Any]) -> bool:
    """Return whether the log has all inputs of a server's block ids. Raises ``BadLine``."""
    salts = [logged.get(name) for name in ("extra_key", "cache_salt")]
    are_texts = all(salt is None or isinstance(salt, str) for salt in salts)
    return bool(token_ids(logged)) and are_texts and not _adapter(logged) and not media_ids(logged)


def media_ids(logged: Mapping[str, Any]) -> list[str]:
    """Return a digest of each image, video and sound of a request."""
    contents: list[Any] = []
    for field in _MEDIA_FIELDS:
        value = logged.get(field)
        contents += value if isinstance(value, list) else [value] if value else []
    return [
        blake2b(json.dumps(item, sort_keys=True).encode(), digest_size=8).hexdigest()
        for item in contents
    ]


def _prompt_text(logged: Mapping[str, Any]) -> str:
    text = logged.get("text")
    if not isinstance(text, str) or not text:
        raise lines.BadLine(f"the prompt was not logged; start the server with {HOW_TO_LOG}")
    if len(text) == 2 * _CUT_CHARACTERS + 3 and text[_CUT_CHARACTERS:-_CUT_CHARACTERS] == "...":
        raise lines.BadLine(f"the prompt's text is shortened; start the server with {HOW_TO_LOG}")
    return text


def _mark_images(text: str, image_names: list[str]) -> str:
    """Return ``text`` with each image's name at its placeholder, or in front if there is none."""
    if not image_names:
        return text
    remaining = iter(image_names)
    text_with_names = _PLACEHOLDER.sub(lambda match: match[0] + next(remaining, ""), text)
    return "".join(remaining) + text_with_names


def _salt(logged: Mapping[str, Any], image_names: list[str] | None = None) -> bytes:
    """Return a salt for prompts that share no KV; empty without tenant, adapter and image."""
    salts = [logged.get(name) or "" for name in ("extra_key", "cache_salt")]
    return salt_of(_adapter(logged) or "", *salts, *(image_names or ()))


def _adapter(logged: Mapping[str, Any]) -> Any:
    return logged.get("lora_id") or logged.get("lora_path")


def _server_blocks(logged: Mapping[str, Any], block_tokens: int) -> tuple[tuple[int, ...], int]:
    """Return the server's block hashes (``radix/live_request.py``, ``extend_path``)."""
    try:
        import xxhash
    except ImportError:
        raise CanopyError(
            "the ids of a server are made with xxhash, which is not installed; "
            "run: pip install xxhash"
        ) from None
    ids = token_ids(logged)
    namespace = tenant_namespace(logged.get("extra_key"), logged.get("cache_salt"))
    raw = memoryview(array("q", ids)).cast("B")
    block_bytes = array("q").itemsize * block_tokens
    digest = xxhash.xxh3_64_intdigest(namespace)
    blocks = []
    for start in range(0, len(raw) - block_bytes + 1, block_bytes):
        digest = xxhash.xxh3_64_intdigest(raw[start : start + block_bytes], seed=digest)
        blocks.append(digest)
    return tuple(blocks), len(ids)
