"""What came over HTTP with a request: its headers, its JSON body as it was sent, and what a body tells
without saying so.

SGLang's models of bodies leave out every field that they do not know.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from sglang_canopy.wire.stamp import MAX_TURN


def headers_of(request: Any) -> Mapping[str, str] | None:
    """The headers of an HTTP request; ``None`` for a call from inside the process."""
    return getattr(request, "headers", None)


def body_of(request: Any) -> Mapping[str, Any]:
    """The JSON object that a Starlette request carried; empty where there is none.

    Its body was read before a route's function ran, so ``json()`` answers without waiting: one step
    of the coroutine is all of it.
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
    """Our keys among ``metadata``, which passes gateways that drop ``custom_params``.

    ``checks``: the keys that are taken, each with the check of its value, which raises
    ``ValueError``. OpenAI's values there are strings: one that the check refuses is read as JSON.
    """
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping):
        return {}
    return {key: _value(metadata[key], check) for key, check in checks.items() if key in metadata}


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
    """What a chat completion body tells by itself.

    ``turn``: assistant messages so far, plus one. ``category``: ``chat``, with ``-tools`` where
    tools are offered, ``-json`` where a response format is, ``-image`` where a message has
    one; ``-after-tool`` where the last message is a tool's answer, that is, where the previous
    response of this conversation stopped for a tool call.
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
