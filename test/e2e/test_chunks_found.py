"""Registered documents found in plain prompts of a real server (`find=on`)."""

import json
import urllib.request

import pytest

from canopy_chunks.text.find import SEAM
from support.chunk_client import (
    DOCUMENT,
    on,
    prompt,
    refused,
    report,
    tokens,
    wait_until_encoded,
)

TEXTS = [
    f"Record {n}. " + " ".join(f"The {a} of the {b} is {c}, as {n} knows." for a, b, c in facts)
    for n, facts in (
        (i, [(a, b, i * 7 + j) for j, (a, b) in enumerate(zip(["colour", "name", "age"] * 3,
         ["river", "lamp", "king", "town", "fox", "ship", "wall", "coat", "star"]))])
        for i in range(3)
    )
]  # fmt: skip

pytestmark = pytest.mark.long


@pytest.fixture
def client(shared_server, smollm2):
    return shared_server(smollm2, *on(find="on"), kv_tokens=8192)


@pytest.fixture
def registered(client):
    """Register and encode the texts; return them and their names."""
    made = [client.post("/canopy/chunks", {"text": text}) for text in TEXTS]
    wait_until_encoded(client)
    return made


def test_plain_tokens_reuse_registered_documents_in_any_order(client) -> None:
    for i in range(4):
        client.post("/canopy/chunks", {"input_ids": tokens(DOCUMENT, i)})
    wait_until_encoded(client)
    for question, order in enumerate(((0, 1, 2, 3), (2, 0, 3, 1))):
        told = report(client.generate(prompt(order, question)[0], 6))
        assert told["fused"]
        assert told["missing_chunks"] == 0
        assert told["reused"] + told["recomputed"] == 4 * (DOCUMENT - 2 * SEAM)


def test_plain_texts_and_chats_reuse_registered_documents_in_any_order(client, registered) -> None:
    length = sum(made["tokens"] - 2 * SEAM for made in registered)
    for order in ((0, 1, 2), (2, 0, 1)):
        for between in ("\n\n", " ", ""):
            text = between.join(["Answer from these.", *(TEXTS[i] for i in order), f"Why {order}?"])
            body = {"text": text, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
            told = report(client.post("/generate", body))
            assert told["fused"], (order, between, told)
            assert told["missing_chunks"] == 0, (order, between, told)
            assert told["reused"] + told["recomputed"] == length
    messages = [{"role": "user", "content": "\n\n".join([TEXTS[1], TEXTS[2], TEXTS[0], "And?"])}]
    chat = {"model": "m", "max_tokens": 4, "messages": messages, "return_meta_info": True}
    told = client.post("/v1/chat/completions", chat)["choices"][0]["meta_info"]["canopy_chunks"][0]
    assert told["fused"]
    assert told["reused"] + told["recomputed"] == length


def test_full_recompute_of_found_documents_equals_plain_serving(client, registered) -> None:
    text = "\n".join([TEXTS[2], TEXTS[0], "Which is older?"])
    said = {"max_new_tokens": 8, "temperature": 0}
    answers = [
        client.post(
            "/generate", {"text": text, "sampling_params": {**said, "custom_params": custom}}
        )
        for custom in ({"canopy_recompute_ratio": 1.0}, {"canopy_chunks": "off"})
    ]
    assert report(answers[0])["fused"]
    assert answers[0]["output_ids"] == answers[1]["output_ids"]


def test_no_tenant_finds_others_or_deleted_documents(client) -> None:
    ids, owner = tokens(DOCUMENT, 77), {"extra_key": "one"}
    name = client.post("/canopy/chunks", {"input_ids": ids, **owner})["id"]
    wait_until_encoded(client)
    asked = [*tokens(9, 1), *ids, *tokens(9, 2)]
    assert report(client.generate(asked, 4, **owner))["fused"]
    for other in ({}, {"extra_key": "two"}):
        assert "canopy_chunks" not in client.generate(asked, 4, **other)["meta_info"]
    gone = urllib.request.Request(
        f"{client.url}/canopy/chunks/{name}?extra_key=one", method="DELETE"
    )
    with urllib.request.urlopen(gone, timeout=60) as answer:
        assert json.loads(answer.read())["kv_deleted"]
    asked = [*tokens(9, 3), *ids, *tokens(9, 4)]
    assert "canopy_chunks" not in client.generate(asked, 4, **owner)["meta_info"]
    assert refused(client, f"/canopy/chunks/{name}/pin?extra_key=one", {})[0] == 400


def test_found_documents_can_be_pinned(client, registered) -> None:
    name = registered[0]["id"]
    assert client.post(f"/canopy/chunks/{name}/pin", {}) == {"id": name, "pinned": True}
    assert client.post(f"/canopy/chunks/{name}/unpin", {}) == {"id": name, "pinned": False}
