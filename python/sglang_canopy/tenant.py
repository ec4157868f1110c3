"""Tenants: the single definition for every part of Canopy.

SGLang separates requests by two fields of their bodies, ``extra_key`` and ``cache_salt``: KV is
shared only if both are equal. A *tenant* is that pair. The tree, the disk tier, documents, hints,
pins, quotas and metrics all name a tenant by the result of ``tenant_of``.

A *namespace* is finer: SGLang appends the id of a LoRA adapter to the extra key of the requests that use
it, since their KV differs. One tenant may use several adapters. A client's key could therefore end like an
adapter's id and match that adapter's KV; ``isolate_adapter_keys`` prevents this.

Any client with a tenant's name can send requests as that tenant, so a name is a secret between the
gateway and the server. A server shows ``shown_tenant`` instead.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import secrets
from collections.abc import Hashable
from typing import Any, NamedTuple
from urllib.parse import quote

from sglang_canopy.errors import CanopyError

MAX_TENANT_CHARS = 128
"""Characters of a tenant's name; a longer name is replaced by its digest."""

VOUCHED_S = 600.0
"""Seconds after a vouched request during which all others count as one tenant."""

AT_LIMIT_SHARE = 0.95
"""Used share of a limit at which metrics count a tenant as at its limit."""

SHOWN_KEY_VARIABLE = "CANOPY_SHOWN_TENANT_KEY"
"""Environment variable with the key of ``shown_tenant``, for a server's processes."""


class Vouched(NamedTuple):
    """A tenant named by a gateway that shows its secret, or with the administrator's key."""

    tenant: str | None


UNVOUCHED = ("unvouched", None)
"""Stands for all requests that no gateway vouches for; no tenant is a pair."""


class ChargedTenants:
    """Chooses the tenant that a request's use of a shared resource is charged to. A client can use
    any number of tenant names, so a name alone is worth little. Each tenant that a gateway vouches
    for is charged itself. All other requests count as one, ``UNVOUCHED``, for ``VOUCHED_S`` after
    each vouched request. Without a gateway each name is charged itself."""

    def __init__(self) -> None:
        self._vouched_until = -math.inf

    def choose(self, tenant: str | None, is_vouched: bool, now: float) -> Hashable:
        """Return the tenant to charge for a request at ``now``, in seconds on the requests' clock."""
        if is_vouched:
            self._vouched_until = now + VOUCHED_S
            return Vouched(tenant)
        return UNVOUCHED if now < self._vouched_until else tenant


def tenant_of(extra_key: str | None, cache_salt: str | None) -> str | None:
    """Return the tenant's name; ``None`` for requests with neither field (the public tenant). ``salt``
    for a salt alone, ``key/`` for an extra key alone, ``key/salt`` for both. All characters except
    letters, digits and ``_.-~`` are percent-escaped, so that no two pairs have one name. Empty strings
    count as absent, as in SGLang."""
    if not extra_key and not cache_salt:
        return None
    name = quote(cache_salt or "", safe="", errors="surrogatepass")
    if extra_key:
        name = f"{quote(extra_key, safe='', errors='surrogatepass')}/{name}"
    return name if len(name) <= MAX_TENANT_CHARS else tenant_digest(name)


def tenants_of_prompts(extra_key: Any, cache_salt: Any) -> set[str | None]:
    """Return the tenants of a request's prompts. Each field is one text for all prompts, or a list of one
    per prompt. Includes ``None`` if a prompt has no tenant; values other than texts count as absent."""
    fields = [field if isinstance(field, list) else [field] for field in (extra_key, cache_salt)]
    prompt_count = max(1, *map(len, fields))
    columns = (field * prompt_count if len(field) == 1 else field for field in fields)
    names = ([_text_or_none(name) for name in column] for column in columns)
    return {tenant_of(*pair) for pair in itertools.zip_longest(*names)}


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def tenant_digest(name: str) -> str:
    """Return ``#`` and the SHA-256 of a tenant's name, for places that others may read, such as a
    server's arguments. It is hard to guess if the name is: a salt of 16 random bytes or more."""
    return f"#{hashlib.sha256(name.encode()).hexdigest()}"


def tenant_of_req(req: Any) -> str | None:
    """Return the tenant of an SGLang ``Req``, from the client's extra key without adapter id."""
    return tenant_of(_clients_key(req), req.cache_salt)


def _clients_key(req: Any) -> str | None:
    saved_key = getattr(req, _CLIENTS_KEY_ATTRIBUTE, "")
    if saved_key != "":
        return saved_key  # type: ignore[no-any-return]
    extra_key, lora_id = req.extra_key, getattr(req, "lora_id", None)
    return extra_key.removesuffix(lora_id) if extra_key and lora_id else extra_key


_CLIENTS_KEY_ATTRIBUTE = "canopy_clients_key"
_ADAPTER_SUFFIX = re.compile(r"/?[0-9a-f]{32}$|/$")

DOCUMENTS_MARK = "\x00canopy-documents/"
"""Separates a client's extra key from the name of a namespace for KV of reused documents. Clients
may not send it: their exact requests would match approximate KV."""


def documents_key(clients_key: str | None, name: str) -> str:
    """Return the extra key of a tenant's namespace ``name`` for KV of reused documents."""
    return f"{clients_key or ''}{DOCUMENTS_MARK}{name}"


def tenants_of_key(
    extra_key: str | None, cache_salt: str | None, has_adapters: bool = False
) -> set[str | None]:
    """Return the tenants whose KV may be under a node's keys: two if, on a server with adapters
    (``has_adapters``), the extra key may end with an adapter's id, which is 32 hex digits."""
    clients_key = (extra_key or "").partition(DOCUMENTS_MARK)[0]
    keys = (clients_key, _ADAPTER_SUFFIX.sub("", clients_key)) if has_adapters else (clients_key,)
    return {tenant_of(key, cache_salt) for key in keys}


def is_documents_key(extra_key: str | None) -> bool:
    """Return whether KV under ``extra_key`` may be approximate."""
    return bool(extra_key) and DOCUMENTS_MARK in extra_key  # type: ignore[operator]


def check_extra_key(extra_key: object) -> None:
    """Raise ``CanopyError`` if a client's extra keys contain ``DOCUMENTS_MARK``."""
    for key in extra_key if isinstance(extra_key, list) else [extra_key]:
        if isinstance(key, str) and is_documents_key(key):
            raise CanopyError(
                f"extra_key contains {DOCUMENTS_MARK!r}, which the server reserves for the KV of reused "
                "documents; send another extra_key"
            )


def unreserved_key(extra_key: str) -> str:
    """Return ``extra_key`` with ``DOCUMENTS_MARK`` replaced, for an entry that does not check keys."""
    return extra_key.replace(DOCUMENTS_MARK, "\x00refused/")


def remember_clients_key(req: Any) -> None:
    """Save a ``Req``'s own extra key before it is replaced, so that its tenant stays the same."""
    setattr(req, _CLIENTS_KEY_ATTRIBUTE, _clients_key(req) or None)


def isolate_adapter_keys(req: Any) -> None:
    """Give a new SGLang ``Req`` an extra key that is equal only for equal adapters and tenants. Applies
    to every request of a server with adapters, including requests without an adapter. A client's key
    gets a final slash, which adapter ids (hex digits) do not contain: the presence of a slash, and the
    text after the last slash, separate the key from the id."""
    remember_clients_key(req)
    clients_key, lora_id = _clients_key(req), getattr(req, "lora_id", None)
    req.extra_key = f"{clients_key}/{lora_id or ''}" if clients_key else lora_id


def tenant_namespace(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Return bytes that differ for any two pairs whose KV must not be shared. ``extra_key``: the
    scheduler's ``Req.extra_key``, including the adapter's id."""
    parts = [(part or "").encode(errors="surrogatepass") for part in (extra_key, cache_salt)]
    return len(parts[0]).to_bytes(8, "little") + parts[0] + parts[1]


def charged_name(tenant: Hashable) -> str | None:
    """Return the shown name of a result of ``ChargedTenants.choose``."""
    name = tenant.tenant if isinstance(tenant, Vouched) else tenant
    return shown_tenant(name) if isinstance(name, str | None) else UNVOUCHED[0]


def new_shown_key() -> None:
    """Generate a random key of ``shown_tenant`` for this process and its children."""
    os.environ[SHOWN_KEY_VARIABLE] = secrets.token_hex(32)


def shown_tenant(name: str | None) -> str | None:
    """Return the name of a tenant in status, metrics and logs: 16 hex digits, ``None`` for the
    public tenant. The digest is keyed, since salts may be short enough to guess. All processes of a
    server use one key, so a tenant's shown name is constant while the server runs."""
    if name is None:
        return None
    if not os.environ.get(SHOWN_KEY_VARIABLE):
        new_shown_key()
    key = bytes.fromhex(os.environ[SHOWN_KEY_VARIABLE])
    return hashlib.blake2b(name.encode(), key=key, digest_size=8).hexdigest()
