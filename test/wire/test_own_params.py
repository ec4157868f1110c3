"""Canopy's own parameters of a request: removed before SGLang's use, and any forged value ignored."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_lab.live.replay import forced_output
from canopy_lab.live.replay.forced_output import ATTRIBUTE as FORCED_ATTRIBUTE
from sglang_canopy.wire.request_state import state_of
from sglang_canopy.wire.stamp import CLIENT_FIELDS, FORCE_OUTPUT, PARAMS_ADDED, STAMP_KEY
from support.live_tree import LiveTree, check_tree, fake_req

OWN_KEYS = (*CLIENT_FIELDS, FORCE_OUTPUT, STAMP_KEY, "canopy_document_bounds")


def request_with(custom_params: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom_params))


@pytest.mark.parametrize("key", OWN_KEYS)
def test_every_key_of_canopys_is_removed_and_still_readable(key: str) -> None:
    req = request_with({key: 1, "7": 0.5})
    assert state_of(req).params == {key: 1}
    assert req.sampling_params.custom_params == {"7": 0.5}
    assert state_of(req).params == {key: 1}


def test_the_received_message_keeps_its_stamp_for_the_next_pipeline_stage() -> None:
    params = SimpleNamespace(custom_params={STAMP_KEY: {"time": 1.0}})
    state_of(SimpleNamespace(sampling_params=params))
    assert params.custom_params == {STAMP_KEY: {"time": 1.0}}


@pytest.mark.parametrize("sglang_keys", [{}, {"__req__": object()}])
def test_a_request_without_parameters_has_none_again(sglang_keys: dict[str, Any]) -> None:
    req = request_with({STAMP_KEY: {PARAMS_ADDED: True}, **sglang_keys})
    state_of(req)
    assert req.sampling_params.custom_params is None


def test_parameters_that_a_client_sent_empty_stay_empty() -> None:
    req = request_with({STAMP_KEY: {}})
    state_of(req)
    assert req.sampling_params.custom_params == {}


@pytest.mark.parametrize("custom_params", [None, "text", 7, ["canopy"], {1: 2}])
def test_parameters_of_others_are_unchanged(custom_params: Any) -> None:
    req = request_with(custom_params)
    assert state_of(req).params == {}
    assert req.sampling_params.custom_params is custom_params


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([10**400, -(10**400), math.nan, math.inf, "[" * 5000, "[{}]", "[[1]]"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
STAMP_NAMES = [field for field, _ in CLIENT_FIELDS.values()]
STAMP_NAMES += ["time", "epoch", "alpha", "beta", "tool_parser"]
FORGED_STAMPS = st.dictionaries(st.sampled_from(STAMP_NAMES), VALUES)
FORGED_PARAMS = VALUES | st.fixed_dictionaries({STAMP_KEY: FORGED_STAMPS | VALUES})


@settings(deadline=None, max_examples=2 * settings.default.max_examples)
@given(st.lists(FORGED_PARAMS, min_size=1, max_size=5))
def test_no_stamp_however_malformed_stops_the_tree(forged_params: list[object]) -> None:
    tree = LiveTree(64, "wa", {"quantum_tokens": 1})
    times = itertools.count()
    last_time = tree.core.clock.now
    for custom_params in forged_params:
        tokens = [next(times)] * 12
        req = fake_req(tokens, [1, 2])
        req.sampling_params = SimpleNamespace(custom_params=custom_params)
        request = tree.core.requests.register(req)
        # A valid stamp may be older than its predecessor; the clock never decreases.
        assert 0.0 <= request.time < 1e11
        assert tree.core.clock.now == max(last_time, request.time)
        last_time = tree.core.clock.now
        tree.core.requests.report_end(req)
        tree.insert(tokens, request)
    tree.evict(30)
    check_tree(tree)


def test_requests_without_a_stamp_arrive_one_after_the_other() -> None:
    tree = LiveTree(64, "wa")
    times = []
    for i in range(5):
        times.append(tree.core.requests.register(fake_req([i] * 8, [])).time)
    assert times == sorted(set(times))
    assert tree.core.clock.now == times[-1]


def test_valid_fields_of_a_stamp_are_used() -> None:
    tree = LiveTree(64, "wa")
    stamp = {"time": 7.0, "category": "chat", "turn": math.nan, "keep_s": 5}
    request = tree.core.requests.register(fake_req([1] * 8, [], stamp))
    assert (request.time, request.category, request.turn) == (7.0, "chat", 1)
    assert request.keep_until == 12.0


def test_a_forged_forced_output_is_ignored() -> None:
    scheduler = SimpleNamespace(server_args=SimpleNamespace(**{FORCED_ATTRIBUTE: True}))
    for value in (7, "text", {"a": 1}, [1.5], [[1]], [-1], None):
        req = request_with({forced_output.PARAM_KEY: value})
        req.rid, req.origin_input_ids = "r", (1,)
        forced_output.record_forced_request(None, scheduler, req)
        assert req.rid not in forced_output.running_requests
