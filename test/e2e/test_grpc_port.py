"""SGLang's own gRPC server next to HTTP: its requests are stamped, and its answers are equal."""

import json
import time
from typing import Any

import pytest

from launch_server import free_port
from support.small_models import LLAMA, write_model

CHAT = "/sglang.runtime.v1.SglangService/ChatComplete"


def chat(port: int, body: dict[str, Any]) -> bytes:
    """Return the answer to an OpenAI chat body, which is the request's only field."""
    import grpc

    raw = json.dumps(body).encode()
    size, length = len(raw), b""
    while size >= 0x80:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream(
            CHAT, request_serializer=lambda given: given, response_deserializer=lambda got: got
        )
        return b"".join(call(b"\x0a" + length + bytes([size]) + raw, timeout=120))


def counted(client: Any) -> dict[str, int]:
    (rank,) = json.loads(client.get("/canopy/status"))["ranks"]
    return {row["category"]: row["requests"] for row in rank["categories"]}


@pytest.mark.long
def test_chats_over_grpc_are_stamped_and_their_answers_unchanged(server, smollm2, tmp_path) -> None:
    pytest.importorskip("grpc")
    model = write_model(tmp_path / "model", smollm2, LLAMA)
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Plan a walk. " * 30}],
        "max_tokens": 6,
        "temperature": 0,
        "custom_params": {"canopy_category": "agent", "canopy_turn": 2},
    }
    said = {}
    for policy in ("lru", "wa"):
        port = free_port()
        options = ("--grpc-port", str(port), "--radix-eviction", policy)
        with server(model, *options, kv_tokens=1024) as client:
            first, again = chat(port, body), chat(port, body)
            over_http = client.post("/v1/chat/completions", body)["choices"][0]["message"]
            said[policy] = over_http["content"]
            spoken = json.dumps(over_http["content"]).strip('"').encode()
            assert spoken in first
            assert spoken in again
            if policy == "wa":
                deadline = time.monotonic() + 60.0
                own = {"generate": 1}  # the server's own warm-up
                while counted(client) != {"agent": 3} | own:  # written once a second
                    assert time.monotonic() < deadline, counted(client)
                    time.sleep(0.1)
                refused = {**body, "custom_params": {"canopy_turn": -1}}
                assert b"canopy_turn" in chat(port, refused)
    assert said["wa"] == said["lru"]
