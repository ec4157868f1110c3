"""SGLang's request receiver of a scheduler, with its sockets, and messages for it."""

from array import array
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import zmq
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


def receiver_of(
    server_args: ServerArgs, context: zmq.Context
) -> tuple[SchedulerRequestReceiver, zmq.Socket]:
    """Return a scheduler's receiver and the socket for its requests."""
    push, pull, rpc = map(context.socket, (zmq.PUSH, zmq.PULL, zmq.DEALER))
    pull.bind("inproc://scheduler")
    push.connect("inproc://scheduler")
    rpc.bind("inproc://rpc")
    receiver = SchedulerRequestReceiver(
        recv_from_tokenizer=pull,
        recv_from_rpc=rpc,
        recv_skipper=None,
        input_blocker=None,
        mm_receiver=None,
        server_args=server_args,
        model_config=SimpleNamespace(is_multimodal=False),
        max_recv_per_poll=-1,
        stream_output=print,
        get_last_batch=lambda: None,
    )
    return receiver, push


def message_of(
    custom_params: Any = None,
    tokens: Iterable[int] = (1, 2, 3),
    rid: str = "r",
    sampling: dict[str, Any] | None = None,
    **fields: Any,
) -> TokenizedGenerateReqInput:
    """Return a request as SGLang's tokenizer process sends it; ``fields`` are other fields of the message."""
    params = SamplingParams(custom_params=custom_params, **(sampling or {"max_new_tokens": 1}))
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", tokens),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        **fields,
    )
