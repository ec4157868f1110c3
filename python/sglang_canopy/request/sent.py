"""What came over HTTP with a request: its JSON body as it was sent, and its headers.

SGLang's models of bodies leave out every field that they do not know.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any


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
    body: Mapping[str, Any], known: Mapping[str, Callable[[Any], Any]]
) -> dict[str, Any]:
    """Our keys among ``metadata``, which passes gateways that drop ``custom_params``.

    ``known``: the keys that are taken, each with the check of its value, which raises
    ``ValueError``. OpenAI's values there are strings: one that the check refuses is read as JSON.
    """
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping):
        return {}
    return {key: _value(metadata[key], known[key]) for key in known if key in metadata}


def _value(given: Any, check: Callable[[Any], Any]) -> Any:
    if not isinstance(given, str):
        return given
    try:
        check(given)
    except ValueError:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(given)
    return given
