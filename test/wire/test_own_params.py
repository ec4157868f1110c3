"""Canopy's keys of ``custom_params`` are removed before a custom logit processor reads the rest."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_canopy.wire.attached import attached
from sglang_canopy.wire.stamp import ADDED, FIELDS, FORCE_OUTPUT, STAMP_KEY

OWN = (*FIELDS, FORCE_OUTPUT, STAMP_KEY, "canopy_chunks")


def request_with(custom: Any) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom))


@pytest.mark.parametrize("key", OWN)
def test_every_key_of_canopys_is_removed_and_still_readable(key: str) -> None:
    req = request_with({key: 1, "7": 0.5})
    assert attached(req).params == {key: 1}
    assert req.sampling_params.custom_params == {"7": 0.5}
    assert attached(req).params == {key: 1}


def test_the_received_message_keeps_its_stamp_for_the_next_pipeline_stage() -> None:
    sent = SimpleNamespace(custom_params={STAMP_KEY: {"time": 1.0}})
    attached(SimpleNamespace(sampling_params=sent))
    assert sent.custom_params == {STAMP_KEY: {"time": 1.0}}


@pytest.mark.parametrize("more", [{}, {"__req__": object()}])
def test_a_request_without_parameters_has_none_again(more: dict[str, Any]) -> None:
    req = request_with({STAMP_KEY: {ADDED: True}, **more})
    attached(req)
    assert req.sampling_params.custom_params is None


def test_parameters_that_a_client_sent_empty_stay_empty() -> None:
    req = request_with({STAMP_KEY: {}})
    attached(req)
    assert req.sampling_params.custom_params == {}


@pytest.mark.parametrize("custom", [None, "text", 7, ["canopy"], {1: 2}])
def test_foreign_parameters_are_unchanged(custom: Any) -> None:
    req = request_with(custom)
    assert attached(req).params == {}
    assert req.sampling_params.custom_params is custom
