"""Fields of SGLang's open proposals: a request with them is an ordinary one."""

import pytest

from sglang_canopy.wire.stamp import client_fields

ASK = {"model": "m", "messages": [{"role": "user", "content": "Which leaf goes first?"}]}
ENVELOPE = {
    "protocol_version": "0.1",
    "message_id": "m-1",
    "actions": [
        {"action_id": f"a-{kind}", "action_type": kind, "action_version": "1.0", "payload": {}}
        for kind in ("kv.prefetch", "kv.demote", "kv.deref")
    ],
}


def test_sglang_takes_a_chat_with_retention_and_priority() -> None:
    protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
    body = {**ASK, "priority": 3, "retention_seconds": 60, "kv_hints": ENVELOPE}
    read = protocol.ChatCompletionRequest.model_validate(body)
    assert read.priority == 3
    assert read.custom_params is None


def test_such_keys_in_custom_params_are_other_peoples() -> None:
    given = {"retention_seconds": 60, "kv.demote": True, "kv_hints": ENVELOPE}
    assert client_fields(given) == ({}, {})
