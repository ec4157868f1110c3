"""Requests to a session that end SGLang's scheduler."""

from collections.abc import Iterator
from typing import Any

import pytest
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.runtime_context import get_parallel
from sglang.srt.session.session_controller import Session

from sglang_canopy.server.scheduler.sessions import request_made
from support.receiver import tokenized

CREATE = getattr(Session.create_req, "__wrapped__", Session.create_req)


def ask(session: Session, name: str, /, **params: Any) -> Any:
    """Return the session's request, and whether SGLang refused it."""
    for node in session.req_nodes.values():
        node.req.finished_reason = "end"
    message = tokenized(rid=name, session_params=SessionParams(id="s", **params))
    message.sampling_params.normalize(None)
    req = request_made(CREATE, session, message, None, 100)
    return req, req.to_finish is not None or req.finished_reason is not None


@pytest.fixture
def session() -> Iterator[Session]:
    with get_parallel().override(tp_rank=0):
        yield Session(10**6, "s")


def test_a_request_replaces_all(session) -> None:
    assert not any(ask(session, rid)[1] for rid in "ab")
    req, refused = ask(session, "c", replace=True)
    assert (list(req.origin_input_ids), refused, *session.req_nodes) == ([1, 2, 3], False, "c")


def test_a_request_replaces_the_turns_after_another(session) -> None:
    ask(session, "a")
    for _ in range(2):  # a retry has the same name
        ask(session, "b", rid="a")
    refused = ask(session, "c", rid="a", replace=True)[1]
    assert (refused, *session.req_nodes) == (False, "a", "c")


def test_a_session_of_thousands_of_turns_is_replaced(session) -> None:
    ask(session, "0")
    last = session.req_nodes["0"]
    for turn in range(1, 3000):
        node = type(last)(last.req.__class__.__new__(last.req.__class__), last)
        node.req.rid, node.req.finished_reason = str(turn), "end"
        session.req_nodes[str(turn)] = last = node
    refused = ask(session, "c", rid="0", replace=True)[1]
    assert (refused, *session.req_nodes) == (False, "0", "c")


ODD = ({"rid": ["a"]}, {"rid": {}, "replace": True}, {"rid": "a", "offset": "x"})


@pytest.mark.parametrize("params", ODD)
def test_values_that_sglang_cannot_compute_are_refused(session, params) -> None:
    ask(session, "a")
    assert ask(session, "b", **params)[1]
    assert not ask(session, "c", rid="a")[1]
