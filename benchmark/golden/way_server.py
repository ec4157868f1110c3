"""The whole way of a request: SGLang's HTTP side, its scheduler and a model, in one process.

A server is built (``whole_server.py``) and its pool filled by chats like the one that is traced.
What only runs at a start, or once a process, is over by then.
"""

from __future__ import annotations

from typing import Any

import torch
from paths import ON_A_CPU, SOURCES, model
from tracer import Tracer
from whole_server import WholeServer

KV_TOKENS, CHATS, WORDS = 768, 12, 60
SERVER = (
    *("--radix-eviction", "wa", "--radix-eviction-policy-config", '{"block_tokens": 16}'),
    *("--device", "cpu", "--dtype", "float32", "--max-total-tokens", str(KV_TOKENS)),
    *("--disable-overlap-schedule", "--sleep-on-idle", "--enable-cache-report"),
)


def trace() -> Tracer:
    """One chat, and the victims that it takes."""
    tracer = Tracer(SOURCES, ON_A_CPU)
    with torch.no_grad():
        server = WholeServer(model(), list(SERVER))
        for number in range(CHATS):
            server.chat(body(number))
        with tracer.staged("http"):
            adapted, http = server.convert(body(CHATS))
        with tracer.staged("sent"):
            server.send(adapted, http)
        with tracer.staged("received"):
            req = server.receive()
        with tracer.staged("computed"):
            server.answer(req)
    return tracer


def body(number: int) -> dict[str, Any]:
    """A chat that nothing but the template's head is shared with."""
    text = " ".join(f"word{number * WORDS + i}" for i in range(WORDS))
    return {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0,
        "custom_params": {"canopy_category": "agent", "canopy_conversation": f"c{number}"},
    }
