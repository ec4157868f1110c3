"""What came over HTTP with a request: its JSON body as it was sent, and its headers.

SGLang's models of bodies leave out every field that they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
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
