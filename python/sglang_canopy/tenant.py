"""Who a request belongs to: the one definition of a tenant, for every part of Canopy.

SGLang keeps requests apart by two fields of their bodies, ``extra_key`` and ``cache_salt``: KV
is shared only where both are equal. A *tenant* is that pair. The tree, the disk tier, documents,
hints, pins, quotas and metrics all name a tenant by the string that ``tenant_of`` returns.

A *namespace* is finer: SGLang appends the id of a LoRA adapter to the extra key of the requests
that use it, since their KV differs. One tenant may use several adapters. Appended like that, a
client's key may end like an adapter's id and find that adapter's KV; ``keep_adapters_apart`` sees
to it that none does.

Whoever knows a tenant's name can send requests as that tenant, so a name is a secret between the
gateway and the server. What a server shows of a tenant is ``shown_tenant``.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
from typing import Any
from urllib.parse import quote

from sglang_canopy.errors import CanopyError

MAX_TENANT = 128
"""Characters of a tenant's name; a longer pair is named by its digest."""

AT_LIMIT = 0.95
"""A tenant that uses this part of what it may have is at its limit, as far as metrics go."""

SHOWN_KEY_VARIABLE = "CANOPY_SHOWN_TENANT_KEY"
"""Where a server's processes find the key of ``shown_tenant``."""


def tenant_of(extra_key: str | None, cache_salt: str | None) -> str | None:
    """The tenant's name; ``None`` for requests with neither field (the public tenant).

    ``salt`` for a salt alone, ``key/`` for an extra key alone, ``key/salt`` for both, with
    everything but letters, digits and ``_.-~`` percent-escaped, so that no two pairs have one
    name. Empty strings count as absent, as they do for SGLang.
    """
    if not extra_key and not cache_salt:
        return None
    name = quote(cache_salt or "", safe="", errors="surrogatepass")
    if extra_key:
        name = f"{quote(extra_key, safe='', errors='surrogatepass')}/{name}"
    return name if len(name) <= MAX_TENANT else tenant_digest(name)


def tenants_of_prompts(extra_key: Any, cache_salt: Any) -> set[str | None]:
    """The tenants of a request as it was sent, where each field is a text for all of its prompts,
    or a list with one for each. ``None`` is among them where a prompt names nobody; what is no text
    names nobody."""
    fields = [one if isinstance(one, list) else [one] for one in (extra_key, cache_salt)]
    prompts = max(1, *map(len, fields))
    rows = (one * prompts if len(one) == 1 else one for one in fields)
    names = itertools.zip_longest(*(([_text(name) for name in row]) for row in rows))
    return {tenant_of(*pair) for pair in names}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def tenant_digest(name: str) -> str:
    """``#`` and the SHA-256 of a tenant's name: names a tenant where others may read, as in a
    server's arguments. Hard to guess where the name is: a salt of 16 random bytes or more."""
    return f"#{hashlib.sha256(name.encode()).hexdigest()}"


def tenant_of_req(req: Any) -> str | None:
    """The tenant of an SGLang ``Req``: of the client's own extra key, without its adapter's id."""
    return tenant_of(_clients_key(req), req.cache_salt)


def _clients_key(req: Any) -> str | None:
    kept = getattr(req, _CLIENTS_KEY, "")
    if kept != "":
        return kept  # type: ignore[no-any-return]
    extra_key, lora_id = req.extra_key, getattr(req, "lora_id", None)
    return extra_key.removesuffix(lora_id) if extra_key and lora_id else extra_key


_CLIENTS_KEY = "canopy_clients_key"

DOCUMENTS_MARK = "\x00canopy-documents/"
"""Separates a client's extra key from the name of a namespace for KV that reuses documents. Clients may
not send it: their exact requests would match approximate KV."""


def documents_key(clients_key: str | None, name: str) -> str:
    """The extra key of a tenant's namespace ``name`` for KV that reuses documents."""
    return f"{clients_key or ''}{DOCUMENTS_MARK}{name}"


def is_documents_key(extra_key: str | None) -> bool:
    """Whether KV under ``extra_key`` may be approximate."""
    return bool(extra_key) and DOCUMENTS_MARK in extra_key  # type: ignore[operator]


def check_extra_key(extra_key: object) -> None:
    """Raise CanopyError if a client's extra key, or one of a batch's, contains ``DOCUMENTS_MARK``."""
    for key in extra_key if isinstance(extra_key, list) else [extra_key]:
        if isinstance(key, str) and is_documents_key(key):
            raise CanopyError(
                f"extra_key contains {DOCUMENTS_MARK!r}, which the server reserves for the KV of reused "
                "documents; send another extra_key"
            )


def unreserved_key(extra_key: str) -> str:
    """A client's extra key that came past the HTTP entry, without ``DOCUMENTS_MARK``."""
    return extra_key.replace(DOCUMENTS_MARK, "\x00refused/")


def remember_clients_key(req: Any) -> None:
    """Note a ``Req``'s own extra key before it gets another one: its tenant stays the same."""
    setattr(req, _CLIENTS_KEY, _clients_key(req) or None)


def keep_adapters_apart(req: Any) -> None:
    """Give a new SGLang ``Req`` an extra key that is equal for equal adapters and tenants alone.

    For every request of a server with adapters, those of the model alone included. A key of the
    client's gets a slash at its end, which ids of adapters (hex digits) do not have: whether there
    is one, and what is behind the last, tells the key from the id.
    """
    remember_clients_key(req)
    own, lora_id = _clients_key(req), getattr(req, "lora_id", None)
    req.extra_key = f"{own}/{lora_id or ''}" if own else lora_id


def namespace_of(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Bytes that differ for any two pairs whose KV must not be shared.

    ``extra_key``: as the scheduler's ``Req`` has it, the adapter's id included.
    """
    parts = [(part or "").encode(errors="surrogatepass") for part in (extra_key, cache_salt)]
    return len(parts[0]).to_bytes(8, "little") + parts[0] + parts[1]


def new_shown_key() -> None:
    """Draw the key of ``shown_tenant`` for this process and those that it starts."""
    os.environ[SHOWN_KEY_VARIABLE] = secrets.token_hex(32)


def shown_tenant(name: str | None) -> str | None:
    """What status, metrics and logs call a tenant: 16 hex digits, ``None`` for the public one.

    The digest has a key, since salts may be short enough to guess. All processes of a server use
    one key, so a tenant has one shown name while the server lives.
    """
    if name is None:
        return None
    if not os.environ.get(SHOWN_KEY_VARIABLE):
        new_shown_key()
    key = bytes.fromhex(os.environ[SHOWN_KEY_VARIABLE])
    return hashlib.blake2b(name.encode(), key=key, digest_size=8).hexdigest()
