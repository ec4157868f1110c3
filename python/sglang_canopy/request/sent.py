"""Read a generation request as sent: headers, JSON body and tenant, and infer category and turn.

SGLang's body models drop unknown fields. Gateways do too: ``sglang-router`` removes both tenant fields
from chat bodies, and our headers, but passes ``metadata``, OpenAI's field for the caller's own use.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.responses import infer_from_response
from sglang_canopy.tenant import check_extra_key, tenants_of_prompts
from sglang_canopy.wire.stamp import MAX_TURN, OF_OTHER_PARTS, client_fields


def headers_of(request: Any) -> Mapping[str, str] | None:
    """Return the headers of an HTTP request; ``None`` for a call from inside the process."""
    return getattr(request, "headers", None)


def by_name(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return a dict of the first value of each header, by lower-case name: Starlette's own look-ups
    scan all headers."""
    if headers is None:
        return None
    return {name.lower(): value for name, value in reversed([*headers.items()])}


def body_of(request: Any) -> Mapping[str, Any]:
    """Return the JSON object of a Starlette request, or an empty mapping.

    The body was read before the route's function ran, so one step completes the ``json()`` coroutine.
    """
    read = getattr(request, "json", None)
    if read is None:
        return {}
    step = read()
    try:
        step.send(None)
    except StopIteration as done:
        return done.value if isinstance(done.value, Mapping) else {}
    except Exception:
        return {}
    finally:
        step.close()
    return {}


def metadata_fields(
    body: Mapping[str, Any], checks: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any]:
    """Return Canopy's keys of ``metadata``, which gateways forward even if they drop ``custom_params``.

    ``checks``: accepted key -> validation, which raises ``ValueError``. Values in OpenAI's ``metadata``
    are strings; a string that fails validation is parsed as JSON.
    """
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping):
        return {}
    return {key: _value(metadata[key], check) for key, check in checks.items() if key in metadata}


DROPPING = ("/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
"""Path suffixes of routes on which SGLang drops ``custom_params``."""


def path_of(request: Any) -> str:
    """Return the path of a Starlette request; empty for a call from inside the process."""
    return str((getattr(request, "scope", None) or {}).get("path", ""))


def dropped_params(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return Canopy's keys of ``custom_params`` on routes on which SGLang drops the field.

    Raises ``CanopyError`` for keys that need another route.
    """
    given = body.get("custom_params")
    if given is None or not path.endswith(DROPPING):
        return {}
    if not isinstance(given, Mapping):
        client_fields(given)  # raises
        return {}
    found = {k: v for k, v in given.items() if isinstance(k, str) and k.startswith("canopy")}
    for key in OF_OTHER_PARTS:
        if key in found:
            raise CanopyError(
                f"custom_params key {key!r} is not supported on {path}; use /v1/chat/completions, "
                "/v1/completions or /generate"
            )
    return found


def infer(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Infer category and turn on routes other than chat and text completions."""
    if path.endswith("/v1/responses"):
        return infer_from_response(body)
    if path.endswith("/api/chat"):
        return infer_from_chat(_ollama_chat(body))
    return {"category": "generate"}


def _ollama_chat(body: Mapping[str, Any]) -> Any:
    messages = body.get("messages")
    given = messages if isinstance(messages, list) else []
    roles = [SimpleNamespace(role=m.get("role")) for m in given if isinstance(m, Mapping)]
    return SimpleNamespace(messages=roles, tools=body.get("tools"))


def _value(given: Any, check: Callable[[Any], Any]) -> Any:
    if not isinstance(given, str):
        return given
    try:
        check(given)
    except ValueError:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(given)
    return given


def infer_from_chat(body: Any) -> dict[str, Any]:
    """Infer category and turn from the body of a chat completion.

    ``turn``: number of assistant messages, plus one. ``category``: ``chat`` and suffixes: ``-tools`` if
    tools are offered, ``-json`` if a response format is given, ``-image`` if a message has an image,
    ``-after-tool`` if the last message is a tool's result (the previous response stopped for a tool
    call).
    """
    messages = body.messages or []
    roles = [getattr(m, "role", None) for m in messages]
    category = "chat"
    if getattr(body, "tools", None):
        category += "-tools"
    if getattr(body, "response_format", None) is not None:
        category += "-json"
    if any(_has_image(m) for m in messages):
        category += "-image"
    if roles and roles[-1] in ("tool", "function"):
        category += "-after-tool"
    return {"category": category, "turn": min(1 + roles.count("assistant"), MAX_TURN)}


def _has_image(message: Any) -> bool:
    content = getattr(message, "content", None)
    return isinstance(content, list) and any(
        getattr(part, "type", "text") not in ("text", "input_text") for part in content
    )


FLAG = "--canopy-require-tenant"
CARRIERS_FLAG = "--canopy-carriers"
NO_CARRIERS, IN_METADATA, IN_HEADERS = "none", "metadata", "headers"
CARRIERS = (NO_CARRIERS, IN_METADATA, IN_HEADERS, f"{IN_METADATA},{IN_HEADERS}")
"""Additional places of a generation request's tenant; ``metadata`` also carries our other keys."""

OFF, WARN, ON = "off", "warn", "on"
MODES = (OFF, WARN, ON)

HEADERS = {"extra_key": "X-Canopy-Extra-Key", "cache_salt": "X-Canopy-Cache-Salt"}
"""Headers for a gateway's tenant; a body or query that names another tenant is refused."""
METADATA = {"extra_key": "canopy_extra_key", "cache_salt": "canopy_cache_salt"}
"""Keys of ``metadata`` with the tenant of a generation request."""
GATEWAY_HEADERS = ("x-smg-routing-key", "x-smg-target-worker", "x-request-id")
"""Headers that ``sglang-router`` and ``smg`` forward or add."""


def sent_values(pairs: Mapping[str, str], name: str) -> list[str]:
    """Return all values of a header or query parameter.

    A gateway may add its header to the client's instead of replacing it.
    """
    listed = getattr(pairs, "getlist", None)
    values = [pairs.get(name)] if listed is None else listed(name)
    return [value for value in values if value]


def tenant_fields(request: Any, body: Mapping[str, Any] | None = None) -> dict[str, str | None]:
    """Return ``extra_key`` and ``cache_salt`` of a Starlette request, for ``tenant_of``.

    Raises ``CanopyError`` if a field is not a string, or has different values.
    """
    found: dict[str, str | None] = {}
    for field, header in HEADERS.items():
        in_body = (body or {}).get(field)
        if not isinstance(in_body, str | None):
            raise CanopyError(f"{field} must be a string, as in the tenant's requests")
        given = {*sent_values(request.query_params, field), *sent_values(request.headers, header)}
        if in_body:
            given.add(in_body)
        if len(given) > 1:
            raise CanopyError(
                f"{field} is given several times, and differently: in the body, the query and the "
                f"header {header} it must be the same; give it once"
            )
        found[field] = given.pop() if given else None
    return found


def set_tenant(
    obj: Any,
    headers: Mapping[str, str] | None,
    body: Mapping[str, Any],
    carriers: str = NO_CARRIERS,
) -> None:
    """Write the tenant given in the body or one of the ``carriers`` into a generation request.

    ``obj``: SGLang's internal request, with the tenant fields that SGLang reads on the route (none
    on ``/v1/messages``). ``headers`` and ``body``: of the HTTP request; ``headers`` is ``None`` for
    a call from inside the process. Raises ``CanopyError`` if a field has different values, or the
    extra key is reserved. Idempotent.
    """
    if headers is not None:
        _write_tenant(obj, headers, body, carriers)
    check_extra_key(getattr(obj, "extra_key", None))


def _write_tenant(
    obj: Any, headers: Mapping[str, str], body: Mapping[str, Any], carriers: str
) -> None:
    metadata = body.get("metadata") if IN_METADATA in carriers else None
    given_there = metadata if isinstance(metadata, Mapping) else {}
    for field, header in HEADERS.items():
        own, in_body = getattr(obj, field, None), body.get(field)
        of_prompts = own if isinstance(own, list) else [own]
        places = [
            *(sent_values(headers, header) if IN_HEADERS in carriers else ()),
            given_there.get(METADATA[field]),
            None if isinstance(in_body, list) else in_body,  # of a batch: ``own``
        ]
        if any(not isinstance(one, str | None) for one in (*places, *of_prompts)):
            raise CanopyError(f"{field} and metadata.{METADATA[field]} must be strings")
        names = {one for one in places if one}
        if not names:
            continue
        names.update(one for one in of_prompts if one)
        if len(names) > 1:
            raise CanopyError(
                f"{field} is given several times, and differently: in the body, its metadata "
                f"({METADATA[field]}) and the header {header} it must be the same; give it once"
            )
        if not of_prompts or not all(of_prompts):  # for every prompt of a batch
            setattr(obj, field, names.pop())


class RequireTenant:
    """Treatment of generation requests without a tenant: ``--canopy-require-tenant``."""

    def __init__(self, mode: str = OFF) -> None:
        self.mode = mode
        self._some_have_one = False
        self._warned = False

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
        tenants = tenants_of_prompts(*(getattr(obj, field, None) for field in HEADERS))
        if tenants != {None}:
            self._some_have_one = True
        if None not in tenants:
            return None
        if (self.mode != OFF or self._some_have_one) and is_sglangs_own():
            return None
        if self.mode == ON:
            raise CanopyError(f"this server runs with {FLAG} {ON}: {_MISSING}. {_HOW}")
        if self._warned or (self.mode == OFF and not self._some_have_one):
            return None
        self._warned = True
        passed = [name for name in GATEWAY_HEADERS if headers.get(name)]
        through = f", and came through a gateway ({', '.join(passed)})" if passed else ""
        others = ", though others do" if self._some_have_one else ""
        return f"{_MISSING}{others}{through}: it shares KV with all such requests. {_HOW}"


_MISSING = "a request names no tenant (cache_salt, extra_key)"
_HOW = (
    f"A gateway may have dropped the fields: start with {CARRIERS_FLAG} {IN_METADATA} and send them "
    f"in metadata, as {METADATA['cache_salt']} and {METADATA['extra_key']}"
)
