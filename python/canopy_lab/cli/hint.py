"""``canopy hint``: send one hint to every worker behind a gateway without ``/canopy/hint``.

A gateway may spread a conversation over any workers, so all of them receive the hint. Workers
without KV of the conversation ignore it. The tenant is read from $CANOPY_EXTRA_KEY and
$CANOPY_CACHE_SALT, the gateway's secret from $CANOPY_GATEWAY_SECRET or the file
$CANOPY_GATEWAY_SECRET_FILE.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.request.client_hints import GATEWAY_HEADER, gateway_secret
from sglang_canopy.request.sent import HEADERS
from sglang_canopy.wire.stamp import client_fields

TIMEOUT_S = 10.0
MAX_WORKERS = 1024
_AT_ONCE = 32
_MAX_ANSWER_BYTES = 1 << 16
_TENANT_VARIABLES = {"extra_key": "CANOPY_EXTRA_KEY", "cache_salt": "CANOPY_CACHE_SALT"}
"""Tenant names are secret, but command lines are readable by other users."""


def worker_urls(text: str) -> list[str]:
    """Parse addresses separated by commas. Raises ``CanopyError`` for an invalid address."""
    urls = [url.strip().rstrip("/") for url in text.split(",") if url.strip()]
    for url in urls:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise CanopyError(f"must be like http://10.0.0.1:30000, got {url[:80]!r}")
    if not 1 <= len(urls) <= MAX_WORKERS:
        raise CanopyError(f"must name 1 to {MAX_WORKERS} servers, got {len(urls)}")
    return list(dict.fromkeys(urls))


@dataclass(frozen=True, slots=True)
class Options:
    conversation: str = declare(None, "CONVERSATION", "its name, as in the conversation's requests")
    workers: list[str] = declare(
        None, "--url",
        "the servers themselves, not the gateway",
        metavar="URL,URL", parse=worker_urls, required=True,
    )  # fmt: skip
    over: bool = declare(False, "--over", "the conversation is over")
    return_in_s: float | None = declare(
        None, "--return-in-s", "when the conversation continues", metavar="SECONDS"
    )
    keep_s: float | None = declare(
        None, "--keep-s", "keep it on the device for this long", metavar="SECONDS"
    )
    api_key: str | None = declare(
        None, "--api-key", "the servers' --admin-api-key, or --api-key", metavar="KEY",
        shown_default="$CANOPY_API_KEY",
    )  # fmt: skip


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Return 0 if every worker accepted the hint, else 1. Raises ``CanopyError``."""
    workers = args.workers
    body = _body(args)
    headers = _headers(args.api_key or os.environ.get("CANOPY_API_KEY"), os.environ)
    with ThreadPoolExecutor(min(len(workers), _AT_ONCE)) as pool:
        answers = list(pool.map(lambda url: send(url, body, headers), workers))
    for url, trouble in zip(workers, answers):
        print(f"{url}: {trouble or 'taken'}")
    return int(any(answers))


def send(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Post one hint. Returns ``None`` if it was accepted, else an error message."""
    request = urllib.request.Request(
        f"{url}/canopy/hint",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read(_MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return "404: no /canopy/hint here; is this a gateway, or a server without Canopy?"
        return f"{error.code}: {_message(error.read(_MAX_ANSWER_BYTES))}"
    except OSError as error:
        return f"no answer ({getattr(error, 'reason', error)})"
    return None


def _body(args: Options) -> dict[str, Any]:
    given = {"over": args.over or None, "return_in_s": args.return_in_s, "keep_s": args.keep_s}
    fields = {key: value for key, value in given.items() if value is not None}
    if not fields:
        raise CanopyError("give at least one of --over, --return-in-s, --keep-s")
    body = {"conversation": args.conversation, **fields}
    client_fields({f"canopy_{key}": value for key, value in body.items()})
    return body


def _headers(api_key: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    headers = {}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    secret = gateway_secret(environment)
    if secret is not None:
        headers[GATEWAY_HEADER] = secret
    for field, variable in _TENANT_VARIABLES.items():
        if environment.get(variable):
            headers[HEADERS[field]] = environment[variable]
    return headers


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return raw[:100].decode(errors="replace").strip() or "refused"
