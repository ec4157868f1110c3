"""Read a request's HTTP headers and original JSON body, and infer category and turn from the body.

SGLang's body models drop unknown fields.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.responses import infer_from_response
from sglang_canopy.wire.stamp import MAX_TURN, OF_OTHER_PARTS, client_fields


def headers_of(request: Any) -> Mapping[str, str] | None:
    """Return the headers of an HTTP request; ``None`` for a call from inside the process."""
    return getattr(request, "headers", None)


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
