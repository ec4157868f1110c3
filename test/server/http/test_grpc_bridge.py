"""SGLang's own gRPC server calls the tokenizer manager as HTTP does: its requests are stamped."""

import asyncio
import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.grpc_bridge import RuntimeHandle

from sglang_canopy.server.http import entry
from sglang_canopy.wire.stamp import read_stamp

ANSWER_TIMEOUT_S = 60.0


class RecordingManager:
    """The part of a tokenizer manager that the bridge needs. Requests are recorded, not forwarded."""

    def __init__(self) -> None:
        self.event_loop = asyncio.new_event_loop()
        self.server_args = SimpleNamespace()
        self.model_config = SimpleNamespace(vocab_size=100)
        self.requests: list[Any] = []
        hooked = functools.partial(entry.stamp_generation, type(self)._record)
        self.generate_request = functools.partial(hooked, self)
        threading.Thread(target=self.event_loop.run_forever, daemon=True).start()

    def auto_create_handle_loop(self) -> None:
        pass

    async def _record(self, obj: Any, request: Any = None) -> Any:
        self.requests.append(obj)
        yield {"text": "", "meta_info": {"finish_reason": {"type": "length"}}}


def call_generate(**fields: Any) -> tuple[list[Any], list[Any]]:
    """Return the requests that a gRPC call becomes, and the answers to its client."""
    manager, answers, is_finished = RecordingManager(), [], threading.Event()

    def callback(payload: Any, **chunk_fields: Any) -> Any:
        answers.append((payload, chunk_fields))
        if chunk_fields.get("finished"):
            is_finished.set()
        return SimpleNamespace(name="Ok")

    handle = RuntimeHandle(manager, None, SimpleNamespace())
    handle.submit_request(req_type="generate", req_dict=fields, chunk_callback=callback)
    assert is_finished.wait(ANSWER_TIMEOUT_S), answers
    manager.event_loop.call_soon_threadsafe(manager.event_loop.stop)
    return manager.requests, answers


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_over_grpc_is_stamped(stream: bool) -> None:
    params = {"max_new_tokens": 1, "custom_params": {"canopy_category": "agent", "canopy_turn": 2}}
    (obj,), _ = call_generate(input_ids=[1, 2, 3], sampling_params=params, stream=stream)
    stamp = read_stamp(obj.sampling_params["custom_params"])
    assert (stamp["category"], stamp["turn"]) == ("agent", 2)
    assert stamp["time"] > 0.0
