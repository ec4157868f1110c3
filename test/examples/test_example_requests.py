"""Requests of the examples, parsed by the server's own code.

The answers are made up; test/served/test_plan.py uses a real server."""

import pytest

from sglang_canopy.wire.hints import hint_of
from sglang_canopy.wire.stamp import client_fields
from support.chat_endpoint import assistant, chat_endpoint
from support.example_files import load_example

pytest.importorskip("openai")
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "x"}]}


@pytest.fixture
def endpoint():
    with chat_endpoint([assistant(str(n)) for n in range(1, 9)], {"/v1/models": MODELS}) as pair:
        yield pair


def test_an_agent_hints_its_return_and_its_end(endpoint) -> None:
    url, received = endpoint
    agent = load_example("agent_loop")
    agent.TOOL_S = 0.0
    assert agent.main(url, "Which leaf goes first?") == ["1", "2", "3"]
    fields_sent = [client_fields(fields)[0] for fields in received.custom_params]
    assert [fields["turn"] for fields in fields_sent] == [1, 2, 3]
    assert ["return_in_s" in fields for fields in fields_sent] == [True, True, False]
    path, hint = received.requests[-1]
    assert path == "/canopy/hint"
    assert hint_of(hint, 0.0)["over"] is True
    # Each prompt extends the previous one, so that the cache can hit.
    prompts = [body["messages"] for path, body in received.requests if path.startswith("/v1")]
    assert prompts[1][: len(prompts[0])] == prompts[0]


def test_each_tenant_has_a_salt_of_its_own(endpoint) -> None:
    url, received = endpoint
    assert load_example("two_tenants").main(url) == {"ann": [4, 4], "bob": [4, 4]}
    salts = [body["cache_salt"] for _, body in received.requests]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert min(map(len, salts)) >= 16
