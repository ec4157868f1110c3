"""The category and the turn that are inferred from a body, and parameters that SGLang drops from it."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canopy_lab.trace.chat import make_chat
from sglang_canopy.errors import CanopyError
from sglang_canopy.request.infer import infer_from_chat, infer_from_responses_body
from sglang_canopy.request.sent import read_dropped_params
from sglang_canopy.wire.stamp import OTHER_PARTS_KEYS

USER = {"role": "user", "content": "hi"}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}
REASONING, CALL = {"type": "reasoning"}, {"type": "function_call", "name": "f"}
RESULT = {"type": "function_call_output", "output": "7"}


def message(role: str, content: object = "hi") -> SimpleNamespace:
    return SimpleNamespace(role=role, content=content)


def chat_body(*messages: SimpleNamespace, **fields: object) -> SimpleNamespace:
    return SimpleNamespace(messages=list(messages), **fields)


def test_turn_and_category_are_read_off_a_chat_body() -> None:
    first_turn = chat_body(message("system"), message("user"))
    assert infer_from_chat(first_turn) == {"category": "chat", "turn": 1}
    third = chat_body(*[message(r) for r in ("user", "assistant", "user", "assistant", "user")])
    assert infer_from_chat(third)["turn"] == 3
    tool_loop = chat_body(message("user"), message("assistant"), message("tool"), tools=[{}])
    assert infer_from_chat(tool_loop) == {"category": "chat-tools-after-tool", "turn": 2}
    with_image = chat_body(message("user", [SimpleNamespace(type="image_url")]), response_format={})
    assert infer_from_chat(with_image)["category"] == "chat-json-image"


@pytest.mark.parametrize(
    ("part_type", "category"),
    [("text", "chat"), ("image_url", "chat-image"), ("audio_url", "chat"), ("video_url", "chat")],
)
def test_a_server_and_a_log_have_one_category_for_a_body(part_type: str, category: str) -> None:
    content = [{"type": "text", "text": "hi"}, {"type": part_type, part_type: "x"}]
    server_body = chat_body(message("user", [SimpleNamespace(**part) for part in content]))
    assert infer_from_chat(server_body)["category"] == category
    assert make_chat([{"role": "user", "content": content}], []).category == category


@pytest.mark.parametrize(
    ("body", "category", "turn"),
    [
        ({"input": "hi"}, "chat", 1),
        ({"input": [USER]}, "chat", 1),
        ({"input": [USER, ANSWER, USER]}, "chat", 2),
        ({"input": [USER, REASONING, CALL, CALL, RESULT, RESULT]}, "chat-after-tool", 2),
        ({"input": [USER, REASONING, CALL, RESULT, ANSWER, USER]}, "chat", 3),
        ({"input": "hi", "tools": [{"type": "function"}]}, "chat-tools", 1),
        ({"input": "hi", "tools": []}, "chat", 1),
        ({"input": "hi", "text": {"format": {"type": "json_schema"}}}, "chat-json", 1),
        ({"input": "hi", "text": {"format": {"type": "text"}}}, "chat", 1),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "chat-image", 1),
    ],
)
def test_the_body_shows_category_and_turn(body: dict[str, Any], category: str, turn: int) -> None:
    assert infer_from_responses_body(body) == {"category": category, "turn": turn}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "role", "content", "format", "x"]), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["input", "tools", "text"]), JSON_VALUES))
def test_any_body_has_a_category_and_a_turn(body: dict[str, Any]) -> None:
    fields = infer_from_responses_body(body)
    assert fields["category"].startswith("chat")
    assert fields["turn"] >= 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat", "/api/generate"])
def test_parameters_dropped_by_sglang_are_read_and_wrong_ones_refused(path) -> None:
    params = {"canopy_turn": 2, "thinking_budget": 7}
    assert read_dropped_params(path, {"custom_params": params}) == {"canopy_turn": 2}
    assert read_dropped_params("/v1/chat/completions", {"custom_params": params}) == {}
    for key in OTHER_PARTS_KEYS:
        with pytest.raises(CanopyError, match=f"{key}.*{path}"):
            read_dropped_params(path, {"custom_params": {key: 1}})
    assert read_dropped_params(path, {"custom_params": [1]}) == {}
