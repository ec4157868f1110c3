"""Logs without their text: ids of blocks under a secret salt (``canopy hash-log``).

A header, then a line a request; times are seconds from the first request.

    {"canopy_hashed_log": 1, "block_tokens": 64, "tokens": "4 bytes of UTF-8 count as a token"}
    {"time": 0.0, "in": 130, "out": 20, "blocks": [81, 27, 40], "conversation": "5f", "turn": 1}

An id is BLAKE2b, keyed with the salt, of the chained hash of the prompt up to the block's end. Equal
prefixes have equal ids; without the salt nobody can test a guess at the text. What a reader can still
see: lengths, times, and who shares a prefix with whom.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from canopy_lab.trace import lines
from canopy_lab.trace.prompts import coarser
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file

VERSION = 1
HEADER = "canopy_hashed_log"
SALT_BYTES = 32
_INFERRED = re.compile(r"default|chat(-tools)?(-json)?(-image)?(-after-tool)?|agent|subagent")
"""Categories that say nothing of whose log it is."""


def read(path: Path, tolerance: lines.Tolerance) -> Iterator[TraceRequest]:
    """Yield the requests of ``path``, in constant memory."""
    clock, block_tokens = lines.Clock(), 0
    for line, text in lines.read_lines(path):
        try:
            entry = lines.parse_object(text)
            if HEADER in entry:
                block_tokens = _block_tokens(entry)
                continue
            if not block_tokens:
                raise lines.BadLine(f"the first line must be the header with {HEADER!r}")
            tokens = lines.count(entry, "in")
            blocks = lines.block_ids(entry, "blocks")
            if len(blocks) > -(-tokens // block_tokens):
                raise lines.BadLine(f"{len(blocks)} blocks are more than {tokens} tokens fill")
            request = TraceRequest(
                clock.check(lines.number(entry, "time")),
                tokens,
                lines.count(entry, "out"),
                blocks,
                block_tokens,
                category=str(entry.get("category", "default")),
                turn=max(1, lines.count(entry, "turn")) if "turn" in entry else 1,
                conversation=_word(entry, "conversation"),
                stop=_word(entry, "stop"),
                user=_word(entry, "user"),
                line=line,
            )
        except lines.BadLine as error:
            tolerance.bad(line, str(error))
            continue
        yield request


def write(
    out: IO[str],
    requests: Iterable[TraceRequest],
    salt: bytes,
    *,
    block_tokens: int,
    method: str,
) -> int:
    """Write ``requests`` hashed, in blocks of about ``block_tokens``; returns how many there were.

    Blocks are whole multiples of the requests' own. Raises ``CanopyError`` for a salt too short.
    """
    if len(salt) < 16:
        raise CanopyError(f"a salt needs 16 bytes or more, got {len(salt)}; {SALT_BYTES} are usual")
    factor = count = 0
    for r in requests:
        if not factor:
            factor = max(1, block_tokens // r.block_tokens)
            header = {HEADER: VERSION, "block_tokens": factor * r.block_tokens, "tokens": method}
            out.write(json.dumps(header) + "\n")
        row: dict[str, Any] = {
            "time": round(r.time_s, 6),
            "in": r.input_tokens,
            "out": r.output_tokens,
            "blocks": [_keyed(i.to_bytes(8, "little", signed=True), salt) for i in coarser(r.blocks, factor)],
            "turn": r.turn,
        }  # fmt: skip
        for name in ("conversation", "user"):
            value = getattr(r, name)
            if value is not None:
                row[name] = f"{_keyed(f'{name}:{value}'.encode(), salt):x}"
        if r.stop is not None:
            row["stop"] = r.stop if r.stop in ("tool", "end", "length") else "end"
        if _INFERRED.fullmatch(r.category):
            row["category"] = r.category
        else:
            row["category"] = f"c{_keyed(f'category:{r.category}'.encode(), salt) % 16**6:06x}"
        out.write(json.dumps(row, separators=(",", ":")) + "\n")
        count += 1
    return count


def salt_of(path: Path | str | None) -> bytes:
    """The salt in the file ``path``, made there (mode 0600) if there is none; without a path a
    new one that nobody keeps. Raises ``CanopyError``."""
    if path is None:
        return secrets.token_bytes(SALT_BYTES)
    path = Path(path)
    try:
        if not path.exists():
            replace_file(path, secrets.token_hex(SALT_BYTES) + "\n")
        return bytes.fromhex(path.read_text(encoding="ascii").strip())
    except (OSError, ValueError) as error:
        raise CanopyError(
            f"cannot use the salt in {str(path)!r} ({error}); it must hold hexadecimal digits, or "
            "not exist yet"
        ) from None


def _keyed(what: bytes, salt: bytes) -> int:
    # Below 2**53, so that every reader of JSON keeps it whole.
    return int.from_bytes(blake2b(what, digest_size=8, key=salt[:64]).digest(), "little") >> 11


def _block_tokens(header: dict[str, Any]) -> int:
    if header[HEADER] != VERSION:
        raise lines.BadLine(f"version {header[HEADER]!r} of hashed logs; this reads {VERSION}")
    return lines.count(header, "block_tokens", least=1)


def _word(entry: dict[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return None if value is None else str(value)
