"""Read a generation request as sent: headers, JSON body, tenant and Canopy's keys.

SGLang's body models drop unknown fields. Gateways do too: ``sglang-router`` removes both tenant fields
from chat bodies, and our headers, but passes ``metadata``, OpenAI's field for the caller's own use.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.tenant import check_extra_key, tenants_of_prompts
from sglang_canopy.wire.stamp import CLIENT_FIELDS, OTHER_PARTS_KEYS


def headers_of(request: Any) -> Mapping[str, str] | None:
    """Return the headers of an HTTP request; ``None`` for a call from inside the process."""
    return getattr(request, "headers", None)


def index_headers(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return a dict of the first value of each header, by lower-case name: Starlette's own look-ups
    scan all headers."""
    if headers is None:
        return None
    return {name.lower(): value for name, value in reversed([*headers.items()])}


def body_of(request: Any) -> Mapping[str, Any]:
    """Return the JSON object of a Starlette request, or an empty mapping. The body was read before the
    route's function ran, so one step completes the ``json()`` coroutine."""
    read = getattr(request, "json", None)
    if read is None:
        return {}
    coroutine = read()
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value if isinstance(done.value, Mapping) else {}
    except Exception:
        return {}
    finally:
        coroutine.close()
    return {}


def read_metadata(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return Canopy's keys of ``metadata``, which gateways forward even if they drop ``custom_params``.
    Values in OpenAI's ``metadata`` are strings; a string that fails validation is parsed as JSON."""
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping):
        return {}
    return {
        k: _parse_value(metadata[k], check)
        for k, (_, check) in CLIENT_FIELDS.items()
        if k in metadata
    }


DROPPING_ROUTES = ("/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
"""Path suffixes of routes on which SGLang drops ``custom_params``."""


def request_path(request: Any) -> str:
    """Return the path of a Starlette request; empty for a call from inside the process."""
    return str((getattr(request, "scope", None) or {}).get("path", ""))


def read_dropped_params(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return Canopy's keys of ``custom_params`` on routes on which SGLang drops the field. Raises
    ``CanopyError`` for keys that need another route."""
    params = body.get("custom_params")
    if not isinstance(params, Mapping) or not path.endswith(DROPPING_ROUTES):
        return {}
    canopy_keys = {k: v for k, v in params.items() if isinstance(k, str) and k.startswith("canopy")}
    for key in OTHER_PARTS_KEYS:
        if key in canopy_keys:
            raise CanopyError(
                f"custom_params key {key!r} is not supported on {path}; use /v1/chat/completions, "
                "/v1/completions or /generate"
            )
    return canopy_keys


def _parse_value(value: Any, check: Callable[[Any], Any]) -> Any:
    if not isinstance(value, str):
        return value
    try:
        check(value)
    except ValueError:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


REQUIRE_TENANT_FLAG = "--canopy-require-tenant"
CARRIERS_FLAG = "--canopy-carriers"
NO_CARRIERS, IN_METADATA = "none", "metadata"
CARRIERS = (NO_CARRIERS, IN_METADATA)
"""Where else a generation request may carry its tenant and Canopy's other keys."""

OFF, WARN, ON = "off", "warn", "on"
MODES = (OFF, WARN, ON)

TENANT_HEADERS = {"extra_key": "X-Canopy-Extra-Key", "cache_salt": "X-Canopy-Cache-Salt"}
"""Headers for a gateway's tenant on Canopy's routes; a body or query that names another is refused."""
TENANT_METADATA = {"extra_key": "canopy_extra_key", "cache_salt": "canopy_cache_salt"}
"""Keys of ``metadata`` with the tenant of a generation request."""
GATEWAY_HEADERS = ("x-smg-routing-key", "x-smg-target-worker", "x-request-id")
"""Headers that ``sglang-router`` and ``smg`` forward or add."""


def sent_values(pairs: Mapping[str, str], name: str) -> list[str]:
    """Return all values of a header or query parameter. A gateway may add its header to the client's
    instead of replacing it."""
    get_all = getattr(pairs, "getlist", None)
    values = [pairs.get(name)] if get_all is None else get_all(name)
    return [value for value in values if value]


def tenant_fields(request: Any, body: Mapping[str, Any] | None = None) -> dict[str, str | None]:
    """Return ``extra_key`` and ``cache_salt`` of a Starlette request, for ``tenant_of``. Raises
    ``CanopyError`` if a field is not a string, or has different values."""
    fields: dict[str, str | None] = {}
    for field, header in TENANT_HEADERS.items():
        in_body = (body or {}).get(field)
        if not isinstance(in_body, str | None):
            raise CanopyError(f"{field} must be a string, as in the tenant's requests")
        values = {*sent_values(request.query_params, field), *sent_values(request.headers, header)}
        if in_body:
            values.add(in_body)
        if len(values) > 1:
            raise CanopyError(
                f"{field} is given several times, and differently: in the body, the query and the "
                f"header {header} it must be the same; give it once"
            )
        fields[field] = values.pop() if values else None
    return fields


def set_tenant(
    obj: Any,
    headers: Mapping[str, str] | None,
    body: Mapping[str, Any],
    carriers: str = NO_CARRIERS,
) -> None:
    """Write the tenant given in the body or its ``metadata`` into a generation request. ``obj``:
    SGLang's internal request, with the tenant fields that SGLang reads on the route (none on
    ``/v1/messages``). ``headers`` and ``body``: of the HTTP request; ``headers`` is ``None`` for a call
    from inside the process. Raises ``CanopyError`` if a field has different values, or the extra key is
    reserved. Idempotent."""
    if headers is not None:
        metadata = body.get("metadata") if carriers == IN_METADATA else None
        _write_tenant(obj, metadata if isinstance(metadata, Mapping) else {}, body)
    check_extra_key(getattr(obj, "extra_key", None))


def _write_tenant(obj: Any, metadata: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    for field, key in TENANT_METADATA.items():
        in_request, in_body = getattr(obj, field, None), body.get(field)
        prompt_names = in_request if isinstance(in_request, list) else [in_request]
        sent_names = [metadata.get(key), None if isinstance(in_body, list) else in_body]
        if any(not isinstance(name, str | None) for name in (*sent_names, *prompt_names)):
            raise CanopyError(f"{field} and metadata.{key} must be strings")
        names = {name for name in sent_names if name}
        if not names:
            continue
        names.update(name for name in prompt_names if name)
        if len(names) > 1:
            raise CanopyError(
                f"{field} is given several times, and differently: in the body and its metadata "
                f"({key}) it must be the same; give it once"
            )
        if not prompt_names or not all(prompt_names):  # for every prompt of a batch
            setattr(obj, field, names.pop())


class RequireTenant:
    """Treatment of generation requests without a tenant: ``--canopy-require-tenant``."""

    def __init__(self, mode: str = OFF) -> None:
        self.mode = mode
        self._has_seen_tenant = False
        self._has_warned = False

    def check(
        self,
        obj: Any,
        headers: Mapping[str, str] | None,
        is_sglangs_own: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Check for a tenant; return a warning about ``obj``, once per process. Call it after
        ``set_tenant``. SGLang's own requests need none.

        With mode ``off``, warn if only some requests have a tenant: a gateway may drop the fields
        on one route only. Raises ``CanopyError`` if a tenant is required.
        """
        if headers is None:
            return None
        tenants = tenants_of_prompts(*(getattr(obj, field, None) for field in TENANT_HEADERS))
        if tenants != {None}:
            self._has_seen_tenant = True
        if None not in tenants:
            return None
        if (self.mode != OFF or self._has_seen_tenant) and is_sglangs_own():
            return None
        if self.mode == ON:
            raise CanopyError(
                f"this server runs with {REQUIRE_TENANT_FLAG} {ON}: {_MISSING_TEXT}. {_REMEDY_TEXT}"
            )
        if self._has_warned or (self.mode == OFF and not self._has_seen_tenant):
            return None
        self._has_warned = True
        gateway_headers = [name for name in GATEWAY_HEADERS if headers.get(name)]
        gateway = f", and came through a gateway ({', '.join(gateway_headers)})"
        through = gateway if gateway_headers else ""
        others = ", though others do" if self._has_seen_tenant else ""
        return (
            f"{_MISSING_TEXT}{others}{through}: it shares KV with all such requests. {_REMEDY_TEXT}"
        )


_MISSING_TEXT = "a request names no tenant (cache_salt, extra_key)"
_REMEDY_TEXT = (
    f"A gateway may have dropped the fields: start with {CARRIERS_FLAG} {IN_METADATA} and send them "
    f"in metadata, as {TENANT_METADATA['cache_salt']} and {TENANT_METADATA['extra_key']}"
)
