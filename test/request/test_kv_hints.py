"""Actions of SGLang's `kv_hints` become Canopy's hints, and each has an outcome."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.config.server_options import RequestOptions
from sglang_canopy.request.kv_hints import MAX_ACTIONS, Outcomes, read
from sglang_canopy.server.http import entry
from sglang_canopy.wire.stamp import MAX_KEEP_S


def action(kind, version="1.0", name="a", **payload):
    fields = {"action_id": name, "action_type": kind, "action_version": version}
    return {**fields, "payload": payload}


def envelope(*actions, protocol="0.1"):
    return {"protocol_version": protocol, "message_id": "m", "actions": list(actions)}


@pytest.mark.parametrize(
    ("sent", "fields"),
    [
        (action("kv.retain", seconds=30), {"keep_s": 30.0}),
        (action("retain", seconds=30, priority=2), {"keep_s": 30.0}),
        (action("kv.release"), {"over": True}),
        (action("kv.demote"), {"over": True}),
        (action("kv.return", in_s=12.5), {"return_in_s": 12.5}),
    ],
)
def test_each_known_action_is_one_hint(sent, fields):
    found, (outcome,) = read(envelope(sent), True)
    assert found == fields
    assert outcome["outcome"] == "accepted"
    struct = SimpleNamespace(
        protocol_version="0.1", actions=[SimpleNamespace(**sent)], message_id="m"
    )
    assert read(struct, True)[0] == fields


@pytest.mark.parametrize(
    ("sent", "outcome", "why"),
    [
        (envelope(action("kv.fetch")), "ignored", "unknown type"),
        (envelope(action("kv.retain", "9", seconds=3)), "ignored", "unknown version"),
        (envelope(action("kv.retain", seconds=3), protocol="7"), "ignored", "protocol_version"),
        (envelope(action("kv.retain", seconds=True)), "ignored", "seconds must be"),
        (envelope(action("kv.retain", seconds=float("nan"))), "ignored", "seconds must be"),
        (envelope(action("kv.return")), "ignored", "in_s must be"),
    ],
)
def test_unknown_or_wrong_actions_are_ignored_with_the_reason(sent, outcome, why):
    fields, (found,) = read(sent, True)
    assert fields == {}
    assert found["outcome"] == outcome
    assert why in found["reason"]


def test_a_long_retention_is_clipped():
    fields, (found,) = read(envelope(action("kv.retain", seconds=1e6)), True)
    assert fields == {"keep_s": MAX_KEEP_S}
    assert found["outcome"] == "clipped"


def test_a_sender_without_trust_is_refused():
    fields, (found,) = read(envelope(action("kv.release")), False)
    assert fields == {}
    assert found["outcome"] == "refused"


def test_later_actions_override_earlier_ones():
    sent = envelope(action("kv.retain", seconds=3), action("kv.release"))
    assert read(sent, True)[0] == {"over": True}
    sent = envelope(action("kv.release"), action("kv.return", in_s=3))
    assert read(sent, True)[0] == {"return_in_s": 3.0}


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["actions", "payload", "action_type", "seconds"]), inner
            )
        ),
    )
)
def test_no_envelope_breaks_the_reader(value):
    read(value, True)
    read({"protocol_version": "0.1", "actions": [value]}, True)


def test_counts_are_bounded_and_unknown_types_count_together():
    counts = Outcomes()
    for number in range(40):
        _, outcomes = read(envelope(*[action(f"kv.x{number}")] * 40), True)
        assert len(outcomes) == MAX_ACTIONS
        counts.add(outcomes)
    counts.add(read(envelope(action("kv.retain", seconds=1)), True)[1])
    assert counts.stats() == {"other": {"ignored": 40 * MAX_ACTIONS}, "retain": {"accepted": 1}}


def test_a_request_is_stamped_with_its_hints_and_its_answer_has_the_outcomes(monkeypatch):
    monkeypatch.setattr(entry, "current", entry.Entry(RequestOptions()))
    obj = SimpleNamespace(
        sampling_params={"custom_params": {"canopy_turn": 2}},
        kv_hints=envelope(action("kv.retain", seconds=30), action("kv.fetch")),
    )

    async def answers(*_, **__):
        yield {"text": "", "meta_info": {"id": "r"}}

    async def collected():
        return [one async for one in entry._with_outcomes(answers(), obj)]

    entry.stamp(obj, {})
    stamp = obj.sampling_params["custom_params"]["canopy"]
    assert (stamp["keep_s"], stamp["turn"]) == (30.0, 2)
    (answer,) = asyncio.run(collected())
    assert [one["outcome"] for one in answer["meta_info"]["kv_hints"]] == ["accepted", "ignored"]
    assert entry.current.kv_hints.stats()["retain"] == {"accepted": 1}


def test_each_prompt_of_a_batch_has_its_own_hints_and_outcomes(monkeypatch):
    """All prompts share an object of sampling parameters, and each has two samples."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    monkeypatch.setattr(entry, "current", entry.Entry(RequestOptions()))
    sent = [envelope(action("kv.release")), envelope(action("kv.retain", seconds=30))]
    obj = GenerateReqInput(text=["a", "b"], sampling_params={"n": 2}, kv_hints=sent)

    async def answers():
        obj.normalize_batch_and_arguments()
        yield [{"text": "", "meta_info": {"id": str(number)}} for number in range(4)]
        for number in (3, 0):
            yield {"text": "", "index": number, "meta_info": {"id": str(number)}}

    async def collected():
        return [one async for one in entry._with_outcomes(answers(), obj)]

    entry.stamp(obj, {})
    whole, *chunks = asyncio.run(collected())
    stamps = [obj[number].sampling_params["custom_params"]["canopy"] for number in range(2)]
    assert [one.get("over") for one in stamps] == [True, None]
    assert [one.get("keep_s") for one in stamps] == [None, 30.0]
    kinds = [one["meta_info"]["kv_hints"][0]["action_type"] for one in (*whole, *chunks)]
    assert kinds == ["release", "release", "retain", "retain", "retain", "release"]
