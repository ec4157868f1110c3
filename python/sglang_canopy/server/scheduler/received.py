"""Stamps for requests that bypass the HTTP entry, made when a scheduler receives them.

SGLang's gRPC servers for routers, and workers attached to an ``Engine`` by other programs, send
requests straight to the scheduler. One rank receives a request and SGLang passes it to all other
ranks of its replica, so all ranks read the stamp made there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from sglang_canopy.config.server_options import options_of
from sglang_canopy.policy.registry import live_names
from sglang_canopy.request.client_hints import rule_of
from sglang_canopy.wire.stamp import PARAMS_ADDED, STAMP_KEY, client_fields, make_stamp


def stamp_received(result: Any, receiver: Any, *_: Any, **__: Any) -> None:
    """Hook after ``SchedulerRequestReceiver._pull_raw_reqs``: stamp requests without a stamp."""
    if not result:
        return
    server_args = receiver.server_args
    # If clients can reach the scheduler without our entry, a stamp may be a client's forgery.
    may_be_forged = bool(server_args.grpc_mode or server_args.smg_grpc_mode)
    received = _sampling_params(result)
    unstamped = [params for params in received if may_be_forged or not _has_stamp(params)]
    if not unstamped or server_args.radix_eviction_policy not in live_names():
        return
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().pp_rank:
        return  # stamped by the first stage
    for params in unstamped:
        params.custom_params = _add_stamp(params.custom_params, server_args)


def _has_stamp(params: Any) -> bool:
    custom_params = params.custom_params
    return isinstance(custom_params, dict) and STAMP_KEY in custom_params


def _sampling_params(received: list[Any]) -> Iterator[Any]:
    """Yield the sampling parameters of every text request."""
    from sglang.srt.managers.io_struct import (
        BatchTokenizedGenerateReqInput,
        TokenizedGenerateReqInput,
    )

    for request in received:
        if isinstance(request, TokenizedGenerateReqInput):
            yield request.sampling_params
        elif isinstance(request, BatchTokenizedGenerateReqInput):
            yield from (part.sampling_params for part in request)


def _add_stamp(custom_params: Any, server_args: Any) -> dict[str, Any]:
    """Return a client's ``custom_params`` with a stamp."""
    fields_sent = {key: _restore_integer(v) for key, v in (custom_params or {}).items()}
    fields_sent.pop(STAMP_KEY, None)
    fields, _ = client_fields(fields_sent)
    requests = options_of(server_args).requests
    rule = rule_of(requests.client_hints, server_args.admin_api_key)
    stamp = make_stamp({"category": "generate"}, rule.authorise(fields, None), time.monotonic())
    if custom_params is None:
        stamp[PARAMS_ADDED] = True
    return {**fields_sent, STAMP_KEY: stamp}


def _restore_integer(value: Any) -> Any:
    """Restore whole numbers: gRPC carries every number as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
