"""What a chunk is called: a digest of its tokens, the model, what they stand behind, and a salt."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def chunk_key(ids: Sequence[int], identity: str, prefix: Sequence[int] = (), salt: str = "") -> str:
    """Content address: the tokens, the model, what they were encoded behind, and the tenant's salt.

    Two tenants with different salts share nothing, not even the knowledge that a chunk exists.
    """
    return chunk_keys(ids, identity, (prefix,), salt)[0]


def chunk_keys(
    ids: Sequence[int], identity: str, prefixes: Sequence[Sequence[int]], salt: str = ""
) -> tuple[str, ...]:
    """The addresses of the same tokens behind each of ``prefixes``."""
    start = hashlib.sha256()
    for part in (identity, salt):
        raw = part.encode()
        start.update(len(raw).to_bytes(8, "little") + raw)
    tokens, found = _token_bytes(ids), []
    for prefix in prefixes:
        digest = start.copy()
        digest.update(_token_bytes(prefix))
        digest.update(tokens)
        found.append(digest.hexdigest())
    return tuple(found)


def _token_bytes(tokens: Sequence[int]) -> bytes:
    """Their number and each of them, 8 bytes little-endian."""
    return len(tokens).to_bytes(8, "little") + struct.pack(f"<{len(tokens)}q", *tokens)
