"""The shortest way of a request: its HTTP body is stamped, SGLang's cache is called by hand.

As the tests' fixtures have it (``support/live_tree.py``): no scheduler, no queue, no model.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paths import ON_A_CPU, SOURCES
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from tracer import Tracer

from sglang_canopy.server.http import entry
from support.live_tree import LiveTree, fake_req

POOL_TOKENS, PROMPT_TOKENS, ANSWER = 768, 150, [5, 6]
CHATS = 9
"""Chats that fill the pool before the traced chat."""


def trace() -> Tracer:
    """One chat, and the victims that it takes."""
    tree = LiveTree(POOL_TOKENS, "wa", {"block_tokens": 16})
    tracer = Tracer(SOURCES, ON_A_CPU)
    for number in range(CHATS):
        serve(tree, number, Tracer([]))
    serve(tree, CHATS, tracer)
    return tracer


def serve(tree: LiveTree, number: int, tracer: Tracer) -> None:
    """Stamp, announce, match and insert a chat into a full pool."""
    said = {"canopy_category": "agent", "canopy_conversation": f"c{number}"}
    params: dict[str, Any] = {"custom_params": said}
    adapted = SimpleNamespace(sampling_params=params, extra_key=None, cache_salt=None)
    messages = [{"role": "user", "content": "Hello."}]
    chat = ChatCompletionRequest(model="m", messages=messages)
    tokens = list(range(1000 * number, 1000 * number + PROMPT_TOKENS))
    with tracer.staged("http"):
        entry.chat_converted((adapted, chat), None, chat)
    custom = adapted.sampling_params["custom_params"]
    req = fake_req(tokens, ANSWER, sampling_params=SimpleNamespace(custom_params=custom))
    with tracer.staged("received"):
        request = tree.core.requests.of(req)
    with tracer.staged("matched"):
        tree.match(tokens)
        tree.core.requests.admit(req)
    with tracer.staged("finished"):
        tree.core.requests.ended(req)
    with tracer.staged("inserted"):
        tree.insert(tokens, request)
