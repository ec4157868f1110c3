"""Fields of requests, sent and inferred, and hints, on the nodes of a live tree."""

import contextlib
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

from sglang_canopy.config.server_options import RequestOptions
from sglang_canopy.radix.live_request import make_live_request
from sglang_canopy.records import LateHint, Leaf
from sglang_canopy.server.http import entry
from sglang_canopy.server.scheduler import arrivals
from sglang_canopy.wire.hints import pack
from sglang_canopy.wire.messages import HINTS
from sglang_canopy.wire.stamp import (
    CLIENT_FIELDS,
    MAX_TURN,
    STAMP_FIELDS,
    STAMP_KEY,
    client_fields,
    make_stamp,
)
from support.live_tree import LiveTree, check_tree, fake_req
from support.receiver import message_of


@pytest.mark.parametrize(
    "wrong_fields",
    [
        {"canopy_category": "x" * 1_000_000},
        {"canopy_category": ""},
        {"canopy_category": "two words"},
        {"canopy_category": 7},
        {"canopy_turn": -1},
        {"canopy_turn": 0},
        {"canopy_turn": 10**30},
        {"canopy_turn": True},
        {"canopy_turn": 1.5},
        {"canopy_conversation": 12},
        {"canopy_conversation": ["a"]},
        {"canopy_stop": "because"},
        {"canopy_over": "yes"},
        {"canopy_return_in_s": float("nan")},
        {"canopy_return_in_s": -3},
        {"canopy_return_in_s": 10**400},
        {"canopy_keep_s": 1e12},
        {"canopy_unknown": {"a": [{"b": 1}]}},
        {STAMP_KEY: {"time": 0}},
    ],
)
def test_a_wrong_field_is_ignored_and_counted_with_one_sentence(wrong_fields, monkeypatch, caplog):
    monkeypatch.setattr(entry, "http_state", entry.HttpState(RequestOptions()))
    for _ in range(2):
        sampling_params = {"custom_params": {**wrong_fields, "canopy_slo_ms": 5}}
        obj = SimpleNamespace(sampling_params=sampling_params)
        entry.stamp_request(obj, {"category": "chat", "turn": 3})
    custom_params = obj.sampling_params["custom_params"]
    stamp = custom_params[STAMP_KEY]
    message = msgpack_decode(msgpack_encode(message_of(custom_params)))
    assert message.sampling_params.custom_params == {"canopy_slo_ms": 5, STAMP_KEY: stamp}
    assert (stamp["category"], stamp["turn"], stamp["slo_ms"]) == ("chat", 3, 5)
    assert not {"stop", "over", "return_in_s", "keep_s"} & stamp.keys()
    (name,) = wrong_fields
    assert entry.http_state.ignored_fields == {name if name in CLIENT_FIELDS else "other": 2}
    (line,) = [record.getMessage() for record in caplog.records]
    assert len(line) < 400
    assert "\n" not in line


def test_foreign_keys_and_other_types_are_skipped() -> None:
    assert client_fields({"thinking_budget": 5, "canopy_turn": 2}) == ({"turn": 2}, {})
    assert client_fields([1]) == client_fields(None) == ({}, {})


@given(st.dictionaries(st.sampled_from(list(CLIENT_FIELDS)), st.none() | st.integers() | st.text()))
def test_any_field_values_make_a_valid_request(params: dict) -> None:
    fields, _ = client_fields(params)
    request = make_live_request(fake_req([], [], make_stamp({}, fields, 5.0)), 0.0, 16)
    assert request.time == 5.0
    assert 1 <= request.turn <= MAX_TURN


def test_every_prompt_of_a_batch_is_stamped_once() -> None:
    batch = SimpleNamespace(sampling_params=[{"max_new_tokens": 1}, {"custom_params": {"a": 1}}])
    entry.stamp_request(batch, {"category": "generate"})
    first, second = (params["custom_params"][STAMP_KEY] for params in batch.sampling_params)
    assert first["category"] == second["category"] == "generate"
    entry.stamp_request(batch, {"category": "other"})
    assert batch.sampling_params[0]["custom_params"][STAMP_KEY] is first
    assert batch.sampling_params[1]["custom_params"]["a"] == 1


def test_the_clients_fields_override_inferred_ones() -> None:
    stamp = make_stamp({"category": "chat", "turn": 4}, {"category": "client"}, 1.0)
    assert (stamp["category"], stamp["turn"]) == ("client", 4)


def test_block_hashes_depend_on_the_salt_and_continue_over_the_output() -> None:
    tree = LiveTree(256, "wa", {"block_tokens": 4})

    def path_of(tokens: list[int], output: list[int], salt: str | None = None) -> list[int]:
        req = fake_req(tokens, output, {"time": 1.0}, cache_salt=salt)
        request = tree.core.requests.register(req)
        tree.core.requests.report_end(req)
        return request.path

    whole_path = path_of(list(range(12)), [])
    assert len(whole_path) == 3
    assert path_of(list(range(6)), list(range(6, 13))) == whole_path
    assert path_of(list(range(12)), [], salt="a")[0] != whole_path[0]


def leaf_of(tree: LiveTree, token: int) -> Leaf:
    """Return the leaf of the node that has ``token``."""
    nodes = [node for node in tree.core._node_arena.values() if node.key]
    return next(node.canopy for node in nodes if token in list(node.key.raw_token_ids()))


def test_a_hint_reaches_a_conversation_that_is_cached_already() -> None:
    tree = LiveTree(64, "wa", {"quantum_tokens": 1})
    system_tokens = [1, 2, 3, 4]
    tree.serve([*system_tokens, 10, 11], time=1, conversation="a")
    tree.serve([*system_tokens, 20, 21], time=2, conversation="b")
    tree.serve([*system_tokens, 30, 31], time=3, conversation="c")
    tree.core.conversations.apply_hint(LateHint(None, "b", 4.0, over=True))
    assert leaf_of(tree, 21).over
    assert not leaf_of(tree, 4).over  # the shared system prompt
    tree.evict(2)
    assert tree.match([*system_tokens, 20, 21]) == 4
    assert tree.match([*system_tokens, 10, 11]) == 6
    check_tree(tree)


def test_a_hint_for_another_tenant_or_an_unknown_conversation_changes_nothing() -> None:
    tree = LiveTree(64, "wa")
    tree.serve([1, 2, 3], time=1, conversation="a")
    tree.core.conversations.apply_hint(LateHint("tenant", "a", 4.0, over=True))
    tree.core.conversations.apply_hint(LateHint(None, "zz", 4.0, over=True))
    assert not leaf_of(tree, 3).over


def test_a_message_of_hints_reaches_the_tree_of_its_scheduler_and_other_messages_sglang() -> None:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    trees = [LiveTree(64, "wa") for _ in range(2)]  # two replicas, or two ranks of one
    hint = {"tenant": None, "conversation": "a", "over": True, "time": 4.0, "source": "client"}
    key = HINTS.key(pack([hint, {"x": 1}]))
    for tree in trees:
        tree.serve([1, 2, 3], time=1, conversation="a")
        scheduler = SimpleNamespace(tree_cache=tree.cache)
        message = SetInternalStateReq(server_args={key: 1})
        assert arrivals.receive_messages(None, scheduler, message).updated
        assert leaf_of(tree, 3).over
        check_tree(tree)
    other = SetInternalStateReq(server_args={"pp_max_micro_batch_size": 8})
    assert arrivals.receive_messages(lambda _, message: message, None, other) is other


def test_a_server_with_another_cache_ignores_hints() -> None:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    request = SetInternalStateReq(server_args={HINTS.key(pack([])): 1})
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace())
    assert not arrivals.receive_messages(None, scheduler, request).updated


def test_a_request_has_every_field_of_its_stamp() -> None:
    stamp: dict[str, object] = {}
    for name, check_field in STAMP_FIELDS.items():
        for value in ("tool", "gateway", True, 2, 1.5):
            with contextlib.suppress(ValueError):
                stamp[name] = check_field(value)
                break
    assert stamp.keys() == STAMP_FIELDS.keys()
    request = make_live_request(fake_req([1], [2], stamp), 0.0, 64)
    assert (request.time, request.keep_until) == (stamp["time"], 2 * stamp["time"])
    assert request.ttft_model == (stamp["alpha"], stamp["beta"])
    for name in stamp.keys() - {"time", "keep_s", "alpha", "beta", "stop", "samples", "added"}:
        assert getattr(request, name) == stamp[name], name
