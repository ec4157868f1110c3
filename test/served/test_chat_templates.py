"""Chats with documents under templates of eight families: SGLang's text where nothing is reused."""

from typing import Any

import pytest

from support.chat_templates import TEMPLATES
from support.chunk_client import ON

FLAGS = ("--served-model-name", "m", "--trust-request-chat-template")
SIGHTS = ("river", "lamp", "king", "town", "fox")


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def ask(client: Any, family: str, messages: list[Any], **custom: str) -> tuple[str, int, Any]:
    """Return the answer, the prompt's tokens, and the report of reuse."""
    template = {"chat_template": TEMPLATES[family]}
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12}
    body |= {"chat_template_kwargs": template, "custom_params": custom, "return_meta_info": True}
    answer = client.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    report = (choice["meta_info"].get("canopy_chunks") or [{}])[0]
    return choice["message"]["content"], answer["usage"]["prompt_tokens"], report


@pytest.mark.long
@pytest.mark.parametrize("family", TEMPLATES)
def test_text_is_sglangs_while_nothing_is_reused(shared_server, plain, small_model, family) -> None:
    sglang = plain(small_model, *FLAGS, kv_tokens=8192)
    client = shared_server(small_model, *FLAGS, *ON, "--radix-eviction", "auto", kv_tokens=8192)
    sights = [f"Under {family} the {one} was seen at the old mill, by the sea, in May of that year, at dawn." for one in SIGHTS]  # fmt: skip
    system = {"role": "system", "content": "Read, and answer in a few words."}
    messages: list[Any] = [system]
    added = [
        {"role": "user", "content": parts(*sights[:3], "What was seen?")},
        {"role": "user", "content": "And who saw it?"},
        {"role": "tool", "tool_call_id": "a", "content": parts(sights[3])},
        {"role": "user", "content": parts(sights[4], "Which was first?")},
    ]
    for message in added:
        messages.append(message)
        text, tokens, _ = ask(sglang, family, messages)
        *same, report = ask(client, family, messages, canopy_documents="parts")
        assert (same, report["fused"]) == ([text, tokens], False), report
        messages.append({"role": "assistant", "content": f"<think>Well.</think>{text}"})
