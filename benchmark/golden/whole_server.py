"""Both halves of a server in one process: SGLang's HTTP side and its scheduler, stepped by hand.

A chat body takes the path of a server: it is converted, tokenised and sent by SGLang's own objects,
and received, queued, computed and inserted into the tree by its scheduler. This file names only
SGLang's objects, so that changes of Canopy do not affect it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from support.scheduler_worker import InProcess


class WholeServer(InProcess):
    """``chat`` for a whole request; ``convert``, ``send``, ``receive`` and ``answer`` for its steps."""

    def __init__(self, model: Path, arguments: list[str]) -> None:
        from sglang.srt.managers import scheduler as module
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.entrypoints.engine import init_tokenizer_manager
        from sglang.srt.server_args import PortArgs, prepare_server_args

        server_args = prepare_server_args(["--model-path", str(model), *arguments])
        ports = PortArgs.init_new(server_args)
        module.publish(server_args, role="tokenizer")
        self.manager, templates = init_tokenizer_manager(server_args, ports)
        self.chats = self.manager.serving_chat_class(self.manager, templates)
        ranks = module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        module.publish(server_args, role="scheduler", ranks=ranks)
        self.scheduler = module.Scheduler(server_args, ports)
        self.loop = asyncio.new_event_loop()
        self.sent: Any = None
        self.turns = None

    def convert(self, body: dict[str, Any]) -> tuple[Any, Any]:
        """Return SGLang's internal request for a chat's body, and its HTTP request."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
        from starlette.requests import Request

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
        http = Request(scope, receive)
        self.loop.run_until_complete(http.json())  # FastAPI reads the body first
        adapted, _ = self.chats._convert_to_internal_request(ChatCompletionRequest(**body), http)
        return adapted, http

    def send(self, adapted: Any, http: Any) -> None:
        """Tokenise a request and send it to the scheduler without waiting for the answer."""

        async def no_answer(*_: Any) -> Any:
            for nothing in ():
                yield nothing

        async def until_sent() -> None:
            self.manager._wait_one_response = no_answer
            async for _ in self.manager.generate_request(adapted, http):
                pass

        self.manager.auto_create_handle_loop = lambda: None
        self.loop.run_until_complete(until_sent())

    def receive(self) -> Any:
        """Return the ``Req`` that waits in the scheduler's queue."""
        for _ in range(1000):
            self.scheduler.process_input_requests(self.scheduler.request_receiver.recv_requests())
            if self.scheduler.waiting_queue:
                return self.scheduler.waiting_queue[-1]
        raise AssertionError("the request did not arrive")

    def answer(self, req: Any) -> None:
        """Compute the request, evicting as needed, and insert it into the tree."""
        self.serve([req])

    def chat(self, body: dict[str, Any]) -> Any:
        """Send a request, receive it and compute its answer."""
        self.send(*self.convert(body))
        req = self.receive()
        self.answer(req)
        return req
