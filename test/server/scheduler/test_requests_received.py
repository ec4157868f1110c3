"""Requests that reach a scheduler past the HTTP entry, through SGLang's own receiver and sockets."""

from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from sglang.srt import runtime_context
from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, sock_send
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

from sglang_canopy.config.server_options import ATTRIBUTE, RequestOptions, ServerOptions
from sglang_canopy.request import client_hints
from sglang_canopy.server.scheduler.received import stamp_received
from sglang_canopy.server.start import plugin
from sglang_canopy.wire.stamp import read_stamp
from support.receiver import message_of, receiver_of

RANKS = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank")
FORGED_STAMP = {"canopy": {"time": 9e9, "category": "forged"}}


@pytest.fixture(scope="module", autouse=True)
def hooks() -> None:
    plugin.load()
    HookRegistry.apply_hooks()


def receive(
    *messages: Any, attn_dp_rank: int = 0, hints_mode: str = client_hints.ON, **arguments: Any
) -> list[dict[str, Any]]:
    """Return the ``custom_params`` that the receiving rank forwards for each request."""
    options = {"model_path": "dummy", "device": "cpu", "radix_eviction_policy": "wa"}
    server_args = ServerArgs(**options | arguments)
    request_options = RequestOptions(client_hints=hints_mode)
    setattr(server_args, ATTRIBUTE, ServerOptions(request_options))
    context = zmq.Context()
    try:
        receiver, push = receiver_of(server_args, context)
        for message in messages:
            sock_send(push, message)
        with get_parallel().override(**dict.fromkeys(RANKS, 0) | {"attn_dp_rank": attn_dp_rank}):
            received = receiver._pull_raw_reqs()
        custom_params = []
        for message in received:
            batch = message if isinstance(message, BatchTokenizedGenerateReqInput) else [message]
            custom_params += [request.sampling_params.custom_params for request in batch]
        return custom_params
    finally:
        context.destroy(linger=0)


def test_a_request_without_a_stamp_gets_one() -> None:
    (plain_params,), (turn_params,) = receive(message_of()), receive(message_of({"canopy_turn": 2}))
    assert read_stamp(plain_params)["category"] == "generate"
    assert read_stamp(turn_params)["turn"] == 2
    assert 0.0 < plain_params["canopy"]["time"] <= turn_params["canopy"]["time"]


def test_a_stamp_of_the_http_entry_stays() -> None:
    (params,) = receive(message_of({"canopy": {"time": 5.0, "category": "chat"}}))
    assert params == {"canopy": {"time": 5.0, "category": "chat"}}


@pytest.mark.parametrize("grpc_argument", ["smg_grpc_mode", "grpc_mode"])
def test_a_grpc_client_cannot_write_a_stamp(grpc_argument: str) -> None:
    (params,) = receive(message_of(FORGED_STAMP), **{grpc_argument: True})
    stamp = read_stamp(params)
    assert stamp["category"] == "generate"
    assert stamp["time"] < 9e9


def test_grpc_carries_numbers_as_floats_and_fields_as_they_are() -> None:
    fields = {"canopy_category": "agent", "canopy_turn": 3.0, "canopy_return_in_s": 1.5}
    (params,) = receive(message_of(fields), smg_grpc_mode=True)
    stamp = read_stamp(params)
    assert (stamp["category"], stamp["turn"], stamp["return_in_s"]) == ("agent", 3, 1.5)


def test_wrong_fields_are_dropped_and_the_request_continues() -> None:
    (params,) = receive(message_of({"canopy_turn": -1.0, "other": "kept"}), smg_grpc_mode=True)
    assert params["other"] == "kept"
    assert "turn" not in params["canopy"]


def test_hints_count_only_if_all_clients_are_trusted() -> None:
    (params,) = receive(
        message_of({"canopy_turn": 2, "canopy_keep_s": 60}),
        smg_grpc_mode=True,
        hints_mode=client_hints.OFF,
    )
    assert "keep_s" not in params["canopy"]
    assert params["canopy"]["turn"] == 2


def test_every_request_of_a_batch_is_stamped() -> None:
    batch = BatchTokenizedGenerateReqInput(batch=[message_of(), message_of()])
    assert all("canopy" in params for params in receive(batch, smg_grpc_mode=True))


def test_under_sglangs_own_policies_no_request_is_stamped() -> None:
    assert receive(message_of(), radix_eviction_policy="lru") == [None]


@pytest.fixture
def any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have built groups of one rank, against which SGLang would
    hold the ranks that are set here."""
    monkeypatch.setattr(runtime_context, "_validate_parallel", lambda *_: None)


@pytest.mark.usefixtures("any_rank")
def test_each_leader_of_data_parallel_attention_stamps_its_own() -> None:
    (params,) = receive(message_of(), attn_dp_rank=1)
    assert read_stamp(params)["category"] == "generate"


@pytest.mark.usefixtures("any_rank")
def test_a_later_pipeline_stage_keeps_the_first_ones_stamps() -> None:
    message = message_of({"canopy": {"time": 5.0}})
    options = {"radix_eviction_policy": "wa", "smg_grpc_mode": True}
    server_args = ServerArgs(model_path="dummy", device="cpu", **options)
    with get_parallel().override(**dict.fromkeys(RANKS, 0) | {"pp_rank": 1}):
        stamp_received([message], SimpleNamespace(server_args=server_args))
    assert message.sampling_params.custom_params == {"canopy": {"time": 5.0}}
