"""Chunk addresses: a digest of the tokens, the model, the preceding prefix, and a salt."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def chunk_key(ids: Sequence[int], identity: str, prefix: Sequence[int] = (), salt: str = "") -> str:
    """Return the address of a chunk: a digest of its tokens, the model, the prefix and the tenant's
    salt.

    Two tenants with different salts share nothing, not even the knowledge that a chunk exists.
    """
    return chunk_keys(ids, identity, (prefix,), salt)[0]


def chunk_keys(
    ids: Sequence[int], identity: str, prefixes: Sequence[Sequence[int]], salt: str = ""
) -> tuple[str, ...]:
    """Return the address of the same tokens for each of ``prefixes``."""
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
    """Return the number of tokens and each token, 8 bytes little-endian."""
    return len(tokens).to_bytes(8, "little") + struct.pack(f"<{len(tokens)}q", *tokens)
