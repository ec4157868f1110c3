"""``kv.release`` of SGLang's ``kv_hints`` ends its conversation; other actions are ignored and counted."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.config.server_options import RequestOptions
from sglang_canopy.request.kv_hints import MAX_READ_ACTIONS, read_envelope
from sglang_canopy.server.http import entry


def action(action_type, version="1.0", **payload):
    fields = {"action_id": "a", "action_type": action_type, "action_version": version}
    return {**fields, "payload": payload}


def envelope_of(*actions, protocol="0.1"):
    return {"protocol_version": protocol, "message_id": "m", "actions": list(actions)}


@pytest.mark.parametrize(
    ("envelope", "expected"),
    [
        (envelope_of(action("kv.release")), (True, 0)),
        (envelope_of(action("kv.fetch"), action("release", "1")), (True, 1)),
        (envelope_of(action("kv.retain", seconds=3)), (False, 1)),
        (envelope_of(action("kv.release", "9")), (False, 1)),
        (envelope_of(action("kv.release"), protocol="7"), (False, 1)),
        (envelope_of(*[action("kv.x")] * 40), (False, MAX_READ_ACTIONS)),
        (None, (False, 0)),
    ],
)
def test_only_a_release_of_a_known_version_counts(envelope, expected):
    assert read_envelope(envelope) == expected
    if envelope is not None:
        actions = [SimpleNamespace(**fields) for fields in envelope["actions"]]
        assert read_envelope(SimpleNamespace(**{**envelope, "actions": actions})) == expected


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["actions", "action_type"]), inner)
        ),
    )
)
def test_no_envelope_makes_the_reader_raise(any_value):
    read_envelope(any_value)
    read_envelope({"protocol_version": "0.1", "actions": [any_value]})


def test_each_prompt_of_a_batch_has_its_own_hints(monkeypatch):
    """All prompts share an object of sampling parameters, and each has two samples."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    monkeypatch.setattr(entry, "http_state", entry.HttpState(RequestOptions()))
    hints = [envelope_of(action("kv.release")), envelope_of(action("kv.fetch"))]
    obj = GenerateReqInput(text=["a", "b"], sampling_params={"n": 2}, kv_hints=hints)
    entry.stamp_request(obj, {})
    obj.normalize_batch_and_arguments()
    stamps = [obj[index].sampling_params["custom_params"]["canopy"] for index in range(2)]
    assert [stamp.get("over") for stamp in stamps] == [True, None]
    assert entry.http_state.ignored_fields == {"kv_hints": 1}


def test_a_release_of_a_sender_without_trust_is_dropped(monkeypatch):
    http_state = entry.HttpState(RequestOptions(client_hints="off"))
    monkeypatch.setattr(entry, "http_state", http_state)
    obj = SimpleNamespace(sampling_params={}, kv_hints=envelope_of(action("kv.release")))
    entry.stamp_request(obj, {})
    assert "over" not in obj.sampling_params["custom_params"]["canopy"]
