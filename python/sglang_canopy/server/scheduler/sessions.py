"""Requests to SGLang's sessions (``/open_session``) that end its scheduler."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def request_made(original: Any, session: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``Session.create_req``: refuse a request with which SGLang cannot compute."""
    params = req.session_params
    if params.replace and not session.streaming:
        _forget(session, params.rid)
    try:
        return original(session, req, *args, **kwargs)
    except Exception:
        logger.exception("SGLang cannot compute a session's request, which is therefore refused.")
        req.session_params = type(params)(id=params.id, rid="\x00")  # an unknown one is refused
        return original(session, req, *args, **kwargs)


def _forget(session: Any, rid: Any) -> None:
    """Abort and remove the session's requests after ``rid``, or all, as SGLang does.

    SGLang fails if it removes all, if two requests have one ``rid``, and beyond 1,000 turns.
    """
    nodes, gone = session.req_nodes, []
    if rid is None:
        gone = list(nodes.values())
        nodes.clear()
    elif isinstance(rid, str) and rid in nodes:
        gone, nodes[rid].children = nodes[rid].children, []
    while gone:
        node = gone.pop()
        node.abort()
        if nodes.get(node.req.rid) is node:
            del nodes[node.req.rid]
        if rid is not None:
            gone += node.children
