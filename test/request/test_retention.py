"""How long parts of a path stay: the record, who may ask for it, and how it travels."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.errors import CanopyError
from sglang_canopy.request import breakpoints
from sglang_canopy.request.fields import MAX_KEEP_S, client_fields
from sglang_canopy.request.retention import (
    ANSWER,
    MAX_RANGES,
    TIERS,
    Retention,
    from_wire,
    keep,
    pin,
    to_wire,
    ttl,
    whole_path,
)
from sglang_canopy.request.retention_sources import SOURCES, asked, at_breakpoint, sources_of
from sglang_canopy.request.stamp import RETENTION_KEY, STAMP_KEY
from sglang_canopy.server import entry

ALL = sources_of("all")
RECORD = st.builds(
    Retention,
    st.lists(st.sampled_from(TIERS), min_size=1, unique=True).map(
        lambda given: tuple(t for t in TIERS if t in given)
    ),
    st.integers(0, 100),
    st.floats(0, 1e6),
    st.integers(ANSWER, 1000),
    st.none() | st.integers(1001, 10**6),
)


@given(st.lists(RECORD, max_size=MAX_RANGES))
def test_records_come_out_at_the_scheduler_as_they_went_in(records) -> None:
    flat = to_wire(records)
    assert json.loads(json.dumps(flat)) == flat
    assert all(type(number) in (int, float) for number in flat)
    assert from_wire(flat) == records


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=12),
    )
)
def test_what_is_forged_is_left_out(forged) -> None:
    for one in from_wire(forged):
        assert 0 <= one.priority <= 100
        assert one.duration_s >= 0
        assert one.end is None or one.end > one.start


def test_the_three_keys_are_cases_of_the_record() -> None:
    stamp = client_fields({"canopy_keep_s": 5, "canopy_ttl_s": 6, "canopy_pin_s": 7})
    assert whole_path(stamp) == [keep(5.0), ttl(6.0), pin(7.0)]
    assert [r.tiers for r in whole_path(stamp)] == [("device",), ("host", "disk"), ("disk",)]
    assert [r.protects for r in whole_path(stamp)] == [True, False, True]


@pytest.mark.parametrize(
    "bad",
    [
        [],
        {},
        "all",
        [{}],
        [{"priority": 50}],
        [{"priority": 101, "duration_s": 1}],
        [{"priority": True, "duration_s": 1}],
        [{"priority": 50, "duration_s": -1}],
        [{"priority": 50, "duration_s": float("nan")}],
        [{"priority": 50, "duration_s": 1, "end": 0}],
        [{"priority": 50, "duration_s": 1, "start": 9, "end": 9}],
        [{"priority": 50, "duration_s": 1, "tiers": []}],
        [{"priority": 50, "duration_s": 1, "tiers": ["tape"]}],
        [{"priority": 50, "duration_s": 1, "for": "ever"}],
        [{"priority": 50, "duration_s": 1}] * (MAX_RANGES + 1),
        [{"priority": 50, "duration_s": 10**400}],
    ],
)
def test_a_malformed_wish_of_our_own_key_is_refused(bad) -> None:
    with pytest.raises(CanopyError, match="canopy_retain") as refusal:
        client_fields({"canopy_retain": bad})
    assert len(str(refusal.value)) < 400


def wire(body: Any, monkeypatch, custom: Any = None, sources: tuple[str, ...] = ALL) -> list:
    """What a request with this body asks for, as the scheduler reads it."""

    async def read() -> Any:
        return body

    monkeypatch.setattr(entry, "retention_sources", sources)
    obj = SimpleNamespace(sampling_params={"custom_params": custom})
    entry.stamp(obj, {}, SimpleNamespace(headers={}, json=read))
    sent = obj.sampling_params["custom_params"]
    assert "canopy_retain" not in sent  # SGLang carries no nested lists
    assert STAMP_KEY in sent
    return from_wire(sent.get(RETENTION_KEY, []))


DIRECTIVES = [
    {"start": 0, "end": 100, "priority": 80, "duration": 30.0},
    {"start": 100, "end": 200, "priority": 0},
    {"covers_output": True, "priority": 1, "duration": None},
    {"priority": "high"},
]
ENVELOPE = {
    "protocol_version": "0.1",
    "message_id": "m",
    "actions": [
        {"action_id": "a", "action_type": "kv.demote", "action_version": "1.0"},
        {
            "action_id": "b",
            "action_type": "kv.retain",
            "action_version": "1.2",
            "payload": {"directives": DIRECTIVES},
        },
        {"action_id": "c", "action_type": "kv.retain", "action_version": "2.0"},
        "not an action",
    ],
}
CONFIG = {
    "token_range_retention_configs": [
        {"token_start": 0, "token_end": 4, "priority": 100, "duration_ms": 30_000},
        {"token_start": 4, "token_end": 9, "priority": 35},
        {"token_start": 9, "token_end": None, "priority": 10, "duration_ms": 1000},
    ],
    "decode_retention_priority": 5,
    "decode_duration_ms": 500,
}
DEVICE, DISK = ("device",), ("disk",)


@pytest.mark.parametrize(
    ("body", "records"),
    [
        ({"prompt_cache_retention": "24h"}, [Retention(DISK, 50, 86400.0)]),
        ({"prompt_cache_retention": "in_memory"}, []),
        ({"priority": 3}, [Retention(DEVICE, 38, 60.0)]),
        ({"priority": 10**30}, [Retention(DEVICE, 100, 60.0)]),
        ({"priority": -2}, [Retention(DEVICE, 33, 60.0)]),
        ({"priority": 0}, []),
        ({"priority": True}, []),
        ({"nvext": {"agent_hints": {"priority": 5}}}, [Retention(DEVICE, 40, 60.0)]),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, [at_breakpoint(3600.0, None)]),
        ({"cache_control": {"type": "ephemeral"}}, [at_breakpoint(300.0, None)]),
        ({"cache_control": {"type": "eternal"}}, []),
        (
            {"kv_hints": ENVELOPE},
            [
                Retention(DEVICE, 80, 30.0, 0, 100),
                Retention(DEVICE, 0, MAX_KEEP_S, 100, 200),
                Retention(DEVICE, 36, MAX_KEEP_S, ANSWER),
            ],
        ),
        (
            {"kv_cache_retention_config": CONFIG},
            [
                Retention(DEVICE, 100, 30.0, 0, 4),
                Retention(DEVICE, 10, 1.0, 9),
                Retention(DEVICE, 5, 0.5, ANSWER),
            ],
        ),
    ],
)
def test_what_other_systems_clients_send(body, records, monkeypatch) -> None:
    assert wire(body, monkeypatch) == records
    assert wire(body, monkeypatch, sources=()) == []


def records_of(obj: Any, monkeypatch) -> list:
    """What a call from inside the process asks for: it has no HTTP body."""
    monkeypatch.setattr(entry, "retention_sources", ALL)
    entry.stamp(obj, {})
    params = obj.sampling_params
    each = params if isinstance(params, list) else [params]
    return [from_wire(one["custom_params"].get(RETENTION_KEY, [])) for one in each]


@pytest.mark.parametrize("typed", [False, True])
def test_an_engine_s_envelope_is_read_as_that_of_a_body(typed, monkeypatch) -> None:
    kv_hints = pytest.importorskip("sglang.srt.managers.kv_hints")
    actions = [one for one in ENVELOPE["actions"] if isinstance(one, dict)]
    envelope: Any = {**ENVELOPE, "actions": actions}
    if typed:
        envelope = kv_hints.decode_kv_hints_envelope(envelope)
    obj = SimpleNamespace(sampling_params={}, kv_hints=envelope, priority=None)
    assert records_of(obj, monkeypatch) == [
        [
            Retention(DEVICE, 80, 30.0, 0, 100),
            Retention(DEVICE, 0, MAX_KEEP_S, 100, 200),
            Retention(DEVICE, 36, MAX_KEEP_S, ANSWER),
        ]
    ]


def test_an_engine_s_priority_is_read_as_that_of_a_body(monkeypatch) -> None:
    obj = SimpleNamespace(sampling_params={}, priority=3)
    assert records_of(obj, monkeypatch) == [[Retention(DEVICE, 38, 60.0)]]


def retained(priority: int) -> dict[str, Any]:
    directive = {"priority": priority, "duration": 9.0}
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0"}
    return {"actions": [{**action, "payload": {"directives": [directive]}}]}


def test_each_request_of_a_batch_has_its_own_envelope(monkeypatch) -> None:
    hints = [retained(50), None, retained(60)]
    obj = SimpleNamespace(sampling_params=[{}, {}, {}], kv_hints=hints)
    assert records_of(obj, monkeypatch) == [
        [Retention(DEVICE, 50, 9.0)],
        [],
        [Retention(DEVICE, 60, 9.0)],
    ]
    for wrong in ([retained(50)], [], [1, 2, 3]):
        obj = SimpleNamespace(sampling_params=[{}, {}, {}], kv_hints=wrong)
        assert records_of(obj, monkeypatch) == [[], [], []]


def test_by_default_nothing_of_it_is_read() -> None:
    assert entry.retention_sources == ()
    assert sources_of("none") == ()
    assert sources_of("priority, kv_hints") == ("priority", "kv_hints")
    with pytest.raises(CanopyError, match="unknown source 'ttl'"):
        sources_of("ttl")


def test_our_own_key_wins_over_theirs(monkeypatch) -> None:
    own = {"canopy_retain": [{"priority": 90, "duration_s": 9, "end": 50, "tiers": ["disk"]}]}
    assert wire({"priority": 3}, monkeypatch, own) == [Retention(DISK, 90, 9.0, 0, 50)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.data())
def test_no_body_asks_for_more_than_there_may_be_nor_raises(data) -> None:
    body: dict[str, Any] = {}
    for source, inner in (
        ("priority", JSON),
        ("nvext", st.fixed_dictionaries({"agent_hints": JSON})),
        ("cache_control", JSON),
        (
            "kv_hints",
            st.fixed_dictionaries({"actions": st.lists(st.dictionaries(st.text(), JSON))}),
        ),
        (
            "kv_cache_retention_config",
            st.fixed_dictionaries(
                {
                    "token_range_retention_configs": st.lists(
                        st.fixed_dictionaries(
                            {"priority": JSON, "duration_ms": JSON, "token_end": JSON}
                        )
                    )
                }
            ),
        ),
        ("messages", JSON),
        ("system", JSON),
        ("tools", JSON),
    ):
        body[source] = data.draw(inner | JSON, source)
    records = asked(ALL, body)
    assert len(records) <= MAX_RANGES
    assert from_wire(to_wire(records)) == records
    breakpoints.find(body, lambda: "a prompt", len)


def test_every_source_says_what_it_means() -> None:
    assert len({s.name for s in SOURCES}) == len(SOURCES)


# ---- breakpoints in a prompt ----

CACHED = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def positions(body: dict[str, Any], prompt: str) -> list[tuple[int | None, float]]:
    """Characters before each breakpoint: a token a character."""
    return [(r.end, r.duration_s) for r in breakpoints.find(body, lambda: prompt, len)]


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def test_a_breakpoint_is_where_its_text_ends_in_the_prompt() -> None:
    body = {
        "tools": [{"name": "f", **HOUR}],
        "system": [text("You are S."), text("Rules.", **HOUR)],
        "messages": [
            {"role": "user", "content": "Rules. Hi"},
            {"role": "assistant", "content": [text("Hello", **CACHED)]},
            {"role": "user", "content": [text("Bye")]},
        ],
    }
    prompt = "<s>You are S.\nRules.\n[f]<u>Rules. Hi</u><a>Hello</a><u>Bye</u>"
    assert positions(body, prompt) == [
        (prompt.index("Rules.") + 6, 3600.0),
        (prompt.index("Rules. Hi"), 3600.0),
        (prompt.index("Hello") + 5, 300.0),
    ]


def test_a_message_that_is_marked_itself_ends_with_its_last_part() -> None:
    body = {"messages": [{"role": "user", "content": [text("a"), text("bc")], **CACHED}]}
    assert positions(body, "..a.bc..") == [(6, 300.0)]


def test_results_of_tools_are_looked_into_and_what_is_rewritten_says_nothing() -> None:
    result = {"type": "tool_result", "content": [text("42")], **CACHED}
    body = {"messages": [{"role": "user", "content": [result, text("gone", **HOUR)]}]}
    assert positions(body, "<tool>42</tool>") == [(8, 300.0)]


def test_only_the_last_four_count_and_bodies_without_any_cost_nothing() -> None:
    parts = [text(f"p{n};", **CACHED) for n in range(9)]
    prompt = "".join(part["text"] for part in parts)
    ends = positions({"messages": [{"role": "user", "content": parts}]}, prompt)
    assert [end for end, _ in ends] == [18, 21, 24, 27]
    plain = {"messages": [{"role": "user", "content": "p0;"}]}
    assert breakpoints.find(plain, lambda: pytest.fail("rendered"), len) == []


@pytest.mark.parametrize("rendered", ["text", "input_ids"])
def test_with_a_real_tokenizer_the_range_ends_where_the_text_does(
    smollm2, rendered, monkeypatch
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    system = "You know the \u00c5land Islands \U0001f30a well.\n" * 40
    messages = [
        {"role": "system", "content": [text(system, **HOUR)]},
        {"role": "user", "content": [text("Where do I begin?")]},
    ]
    plain = [{**m, "content": m["content"][0]["text"]} for m in messages]
    prompt = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    adapted = SimpleNamespace(text=None, input_ids=None)
    setattr(adapted, rendered, prompt if rendered == "text" else ids)
    monkeypatch.setattr(entry, "retention_sources", ALL)

    async def read() -> Any:
        return {"messages": messages}

    serving = SimpleNamespace(tokenizer_manager=SimpleNamespace(tokenizer=tokenizer))
    (found,) = entry._breakpoints(serving, adapted, SimpleNamespace(json=read))
    assert found.duration_s == 3600.0
    assert found.end is not None
    before, after = (tokenizer.decode(ids[: found.end + more]) for more in (-2, 2))
    assert not before.rstrip().endswith("well.")
    assert system.strip() in after
    assert "Where" not in after
