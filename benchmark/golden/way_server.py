"""The path of a request through SGLang's HTTP side, its scheduler and a model, in one process.

A server is built (``whole_server.py``) and its pool filled by similar chats before the traced chat, so
that code that runs once per process is not traced.
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
    """Return a chat that shares only the template's head with others."""
    text = " ".join(f"word{number * WORDS + i}" for i in range(WORDS))
    return {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0,
        "custom_params": {"canopy_category": "agent", "canopy_conversation": f"c{number}"},
    }
