"""Conversations on ``/v1/responses``: stateless clients, stored chains, and what bodies show."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.admission.session import Session, SessionIndex
from sglang_canopy.errors import CanopyError
from sglang_canopy.records import Request
from sglang_canopy.request.identity import Identities
from sglang_canopy.request.responses import infer_from_response
from sglang_canopy.request.sent import dropped_params
from sglang_canopy.wire.stamp import OF_OTHER_PARTS

USER = {"role": "user", "content": "hi"}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}
THOUGHT, CALL = {"type": "reasoning"}, {"type": "function_call", "name": "f"}
RESULT = {"type": "function_call_output", "output": "7"}


def is_recognised(*bodies: dict[str, Any]) -> bool:
    """Whether the gate finds the session of the first body's request with the second's."""
    rule = Identities()
    names = [
        rule.fields(body, {}, rid=f"resp_{i}").get("conversation") for i, body in enumerate(bodies)
    ]
    first, second = (
        Request(float(i), path=tuple(range(10 * (i + 1))), prompt_tokens=160 * (i + 1),
                block_tokens=16, conversation=name)
        for i, name in enumerate(names)
    )  # fmt: skip
    index = SessionIndex()
    session = Session(0, None, names[0], 0.0, None)  # type: ignore[arg-type]
    index.describe(session, first, 160)
    return index.find(second) is session


@pytest.mark.parametrize("more", [{}, {"store": False}, {"store": True}])
def test_a_stateless_clients_next_turn_is_recognised_by_its_prompt(more: dict[str, Any]) -> None:
    assert is_recognised({"input": [USER], **more}, {"input": [USER, ANSWER, USER], **more})


def test_a_stored_chains_next_turn_is_recognised() -> None:
    assert is_recognised({"input": "hi"}, {"input": "and?", "previous_response_id": "resp_0"})


def test_a_named_session_is_not_another_names() -> None:
    first = {"input": "hi", "session_id": "a"}
    assert not is_recognised(first, {"input": "hi", "session_id": "b"})


@pytest.mark.parametrize(
    ("body", "category", "turn"),
    [
        ({"input": "hi"}, "chat", 1),
        ({"input": [USER]}, "chat", 1),
        ({"input": [USER, ANSWER, USER]}, "chat", 2),
        ({"input": [USER, THOUGHT, CALL, CALL, RESULT, RESULT]}, "chat-after-tool", 2),
        ({"input": [USER, THOUGHT, CALL, RESULT, ANSWER, USER]}, "chat", 3),
        ({"input": "hi", "tools": [{"type": "function"}]}, "chat-tools", 1),
        ({"input": "hi", "tools": []}, "chat", 1),
        ({"input": "hi", "text": {"format": {"type": "json_schema"}}}, "chat-json", 1),
        ({"input": "hi", "text": {"format": {"type": "text"}}}, "chat", 1),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "chat-image", 1),
    ],
)
def test_the_body_shows_category_and_turn(body: dict[str, Any], category: str, turn: int) -> None:
    assert infer_from_response(body) == {"category": category, "turn": turn}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "format", "x"]), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["input", "tools", "text"]), JSON))
def test_any_body_has_a_category_and_a_turn(body: dict[str, Any]) -> None:
    found = infer_from_response(body)
    assert found["category"].startswith("chat")
    assert found["turn"] >= 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat", "/api/generate"])
def test_parameters_dropped_by_sglang_are_read_and_wrong_ones_refused(path) -> None:
    params = {"canopy_turn": 2, "thinking_budget": 7}
    assert dropped_params(path, {"custom_params": params}) == {"canopy_turn": 2}
    assert dropped_params("/v1/chat/completions", {"custom_params": params}) == {}
    for key in OF_OTHER_PARTS:
        with pytest.raises(CanopyError, match=f"{key}.*{path}"):
            dropped_params(path, {"custom_params": {key: 1}})
    with pytest.raises(CanopyError, match="must be a JSON object"):
        dropped_params(path, {"custom_params": [1]})
