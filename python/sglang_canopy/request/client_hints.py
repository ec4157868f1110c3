"""Trust in client hints: ``--canopy-client-hints on|off|trusted``.

Hints give priority: keep a prefix, evict it first, or set its TTL. With ``trusted``, only the
administrator and a gateway with a secret header may send hints, for clients that distrust each other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.records import CLIENT, GATEWAY
from sglang_canopy.request.access import has_admin_key, is_same_secret

CLIENT_HINTS_FLAG = "--canopy-client-hints"
ON, OFF, TRUSTED = "on", "off", "trusted"
MODES = (ON, OFF, TRUSTED)

GATEWAY_HEADER = "X-Canopy-Gateway-Secret"
SECRET_VARIABLE = "CANOPY_GATEWAY_SECRET"
SECRET_FILE_VARIABLE = "CANOPY_GATEWAY_SECRET_FILE"
MIN_SECRET_CHARS, MAX_SECRET_CHARS = 16, 1024

PRIORITY_FIELDS = frozenset({"over", "return_in_s", "keep_s", "ttl_s", "linear"})
"""Fields that affect other requests. The rest only describes the request."""


@dataclass(frozen=True, slots=True)
class HintRule:
    """Which clients' hints this server applies. ``repr`` shows neither key nor secret."""

    mode: str = ON
    admin_api_key: str | None = None
    gateway_secret: str | None = None

    def __repr__(self) -> str:
        return f"HintRule({self.mode!r})"

    def is_from_gateway(self, headers: Mapping[str, str]) -> bool:
        """Return whether the headers (names in lower case) contain the gateway's secret."""
        return is_same_secret(headers.get(GATEWAY_HEADER.lower(), ""), self.gateway_secret)

    def source(self, headers: Mapping[str, str] | None) -> str:
        """Return the source of a request's hints; hint accuracy is learnt per source."""
        is_trusted = headers is not None and (
            self.is_from_gateway(headers) or has_admin_key(headers, self.admin_api_key)
        )
        return GATEWAY if is_trusted else CLIENT

    def accepts(self, headers: Mapping[str, str] | None) -> bool:
        """Return whether to use hints of a request with these headers; ``None``: a request without headers."""
        if self.mode != TRUSTED:
            return self.mode == ON
        return self.source(headers) == GATEWAY

    def authorise(
        self, fields: dict[str, Any], headers: Mapping[str, str] | None
    ) -> dict[str, Any]:
        """Return a request's validated ``fields`` without its unauthorised ones."""
        if fields.keys().isdisjoint(PRIORITY_FIELDS) or self.accepts(headers):
            return fields
        return {field: value for field, value in fields.items() if field not in PRIORITY_FIELDS}


def rule_of(mode: str, admin_api_key: str | None) -> HintRule:
    """Return the rule set by a server's flag and environment. Raises ``CanopyError``."""
    rule = HintRule(mode, admin_api_key, read_gateway_secret(os.environ))
    if mode == TRUSTED and not (rule.admin_api_key or rule.gateway_secret):
        raise CanopyError(
            f"{CLIENT_HINTS_FLAG} {TRUSTED} needs a credential; give --admin-api-key, or the gateway's secret in "
            f"the environment variable {SECRET_VARIABLE} or in a file named by "
            f"{SECRET_FILE_VARIABLE}"
        )
    return rule


def read_gateway_secret(environment: Mapping[str, str]) -> str | None:
    """Return the secret from its variable or its file; ``None`` if neither variable is set. Raises
    ``CanopyError``, without the secret in its text, for an invalid secret."""
    variable, secret = SECRET_VARIABLE, environment.get(SECRET_VARIABLE)
    file = environment.get(SECRET_FILE_VARIABLE)
    if secret is not None and file is not None:
        raise CanopyError(f"{SECRET_VARIABLE} and {SECRET_FILE_VARIABLE} are both set; unset one")
    if file is not None:
        variable = SECRET_FILE_VARIABLE
        try:
            with Path(file).open(encoding="utf-8") as stream:
                secret = stream.read(2 * MAX_SECRET_CHARS).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CanopyError(f"{variable}: {file!r:.200} cannot be read: {error}") from None
    if secret is None:
        return None
    if (
        not MIN_SECRET_CHARS <= len(secret) <= MAX_SECRET_CHARS
        or not secret.isascii()
        or " " in secret
    ):
        raise CanopyError(
            f"{variable}: the secret must have {MIN_SECRET_CHARS} to {MAX_SECRET_CHARS} ASCII characters "
            f"without spaces, got {len(secret)} characters; make one with 'openssl rand -hex 32'"
        )
    return secret
