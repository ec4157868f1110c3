"""Replaced sampled tokens, and refused requests."""

import types
from typing import Any

import pytest

from canopy_lab.live.replay import forced_output
from canopy_lab.live.replay.forced_output import ATTRIBUTE, ForcedOutput, check_tokens, replacements
from sglang_canopy.errors import CanopyError

FORCED_OUTPUTS = {"a": ForcedOutput(10, [100, 101, 102]), "b": ForcedOutput(4, [7])}


def test_prefill_gives_the_first_token_and_each_decode_the_next() -> None:
    for seq_len, token in ((10, 100), (11, 101), (12, 102)):
        assert list(replacements(FORCED_OUTPUTS, ["x", "a"], [50, seq_len])) == [(1, token)]


def test_the_middle_of_a_chunked_prefill_and_a_used_up_list_are_unchanged() -> None:
    assert list(replacements(FORCED_OUTPUTS, ["a", "b"], [8, 5])) == []
    assert list(replacements(FORCED_OUTPUTS, ["a", "b"], [13, 4])) == [(1, 7)]


@pytest.mark.parametrize("tokens", ["abc", [1, "2"], [True], [-1], [50], {"a": 1}, 7])
def test_a_list_that_cannot_be_obeyed_is_refused(tokens: Any) -> None:
    with pytest.raises(CanopyError, match="token ids from 0 to 49"):
        check_tokens({forced_output.PARAM_KEY: tokens}, vocab_size=50)


def test_unforced_outputs_are_not_checked() -> None:
    assert check_tokens(None, 50) is None
    assert check_tokens({"canopy_turn": 1}, 50) is None
    assert check_tokens({forced_output.PARAM_KEY: []}, 50) == []


class RequestWithParams:
    def __init__(self, rid: str, custom_params: dict[str, Any]) -> None:
        self.rid, self.origin_input_ids = rid, [1, 2, 3]
        self.sampling_params = types.SimpleNamespace(custom_params=custom_params)


def test_a_server_without_the_flag_records_no_request() -> None:
    req = RequestWithParams("r", {forced_output.PARAM_KEY: [5]})
    scheduler = types.SimpleNamespace(server_args=types.SimpleNamespace())
    forced_output.record_forced_request(None, scheduler, req)
    assert len(forced_output.running_requests) == 0


def test_a_finished_request_is_forgotten_with_its_object() -> None:
    scheduler = types.SimpleNamespace(server_args=types.SimpleNamespace(**{ATTRIBUTE: True}))
    req = RequestWithParams("r", {forced_output.PARAM_KEY: [5]})
    forced_output.record_forced_request(None, scheduler, req)
    assert forced_output.running_requests["r"] == ForcedOutput(3, [5])
    del req
    assert len(forced_output.running_requests) == 0
