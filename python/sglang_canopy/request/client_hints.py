"""Whose hints are heeded: ``--canopy-client-hints on|off|trusted``.

A hint asks for priority: keep this, drop that first, hold it on disk. Where clients do not trust
each other, hints are for the administrator, and for a gateway that shows a secret in a header.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.records import CLIENT, GATEWAY
from sglang_canopy.request.access import has_admin_key, same_secret

FLAG = "--canopy-client-hints"
ON, OFF, TRUSTED = "on", "off", "trusted"
MODES = (ON, OFF, TRUSTED)

GATEWAY_HEADER = "X-Canopy-Gateway-Secret"
SECRET_VARIABLE = "CANOPY_GATEWAY_SECRET"
SECRET_FILE_VARIABLE = "CANOPY_GATEWAY_SECRET_FILE"
MIN_SECRET, MAX_SECRET = 16, 1024

PRIORITY_FIELDS = frozenset({"over", "return_in_s", "keep_s", "ttl_s", "pin_s", "parent", "linear"})
"""What a request may ask for at the cost of others; its category, turn, conversation and stop
reason only describe it."""


@dataclass(frozen=True, slots=True)
class ClientHints:
    """The rule of this server. ``repr`` shows neither key nor secret."""

    mode: str = ON
    admin_api_key: str | None = None
    gateway_secret: str | None = None

    def __repr__(self) -> str:
        return f"ClientHints({self.mode!r})"

    def from_gateway(self, headers: Mapping[str, str]) -> bool:
        """Whether a request shows the gateway's secret. Header names in lower case."""
        return same_secret(headers.get(GATEWAY_HEADER.lower(), ""), self.gateway_secret)

    def source(self, headers: Mapping[str, str] | None) -> str:
        """Whose word the hints of a request with these headers are: how often each source's came
        true is learnt apart."""
        trusted = headers is not None and (
            self.from_gateway(headers) or has_admin_key(headers, self.admin_api_key)
        )
        return GATEWAY if trusted else CLIENT

    def heeded(self, headers: Mapping[str, str] | None) -> bool:
        """Whether hints of a request with these headers count; ``None``: it came without any."""
        if self.mode != TRUSTED:
            return self.mode == ON
        return self.source(headers) == GATEWAY

    def allowed(self, fields: dict[str, Any], headers: Mapping[str, str] | None) -> dict[str, Any]:
        """``fields`` of a request (checked) without what this client may not ask for."""
        if fields.keys().isdisjoint(PRIORITY_FIELDS) or self.heeded(headers):
            return fields
        return {field: value for field, value in fields.items() if field not in PRIORITY_FIELDS}


def rule_of(mode: str, admin_api_key: str | None) -> ClientHints:
    """The rule that a server's flag and environment ask for. Raises ``CanopyError``."""
    rule = ClientHints(mode, admin_api_key, gateway_secret(os.environ))
    if mode == TRUSTED and not (rule.admin_api_key or rule.gateway_secret):
        raise CanopyError(
            f"{FLAG} {TRUSTED}: nobody is trusted; give --admin-api-key, or the gateway's secret in "
            f"the environment variable {SECRET_VARIABLE} or in a file named by "
            f"{SECRET_FILE_VARIABLE}"
        )
    return rule


def gateway_secret(environment: Mapping[str, str]) -> str | None:
    """The secret, from its variable or the file that the other one names; ``None`` without both.

    Raises ``CanopyError``, which does not show the secret, if it cannot be used.
    """
    variable, secret = SECRET_VARIABLE, environment.get(SECRET_VARIABLE)
    file = environment.get(SECRET_FILE_VARIABLE)
    if secret is not None and file is not None:
        raise CanopyError(f"{SECRET_VARIABLE} and {SECRET_FILE_VARIABLE} are both set; unset one")
    if file is not None:
        variable = SECRET_FILE_VARIABLE
        try:
            with Path(file).open(encoding="utf-8") as opened:
                secret = opened.read(2 * MAX_SECRET).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CanopyError(f"{variable}: {file!r:.200} cannot be read: {error}") from None
    if secret is None:
        return None
    if not MIN_SECRET <= len(secret) <= MAX_SECRET or not secret.isascii() or " " in secret:
        raise CanopyError(
            f"{variable}: the secret must have {MIN_SECRET} to {MAX_SECRET} ASCII characters "
            f"without spaces, got {len(secret)} characters; make one with 'openssl rand -hex 32'"
        )
    return secret
