"""``--warmups canopy_chunks``: the first user's prompt is not the first that is fused."""

import json

import pytest


@pytest.mark.long
def test_prompts_were_fused_before_the_first_request_and_nothing_of_them_is_left(
    server, tiny_model
) -> None:
    arguments = ("--canopy-chunks", "on", "--warmups", "canopy_chunks")
    with server(tiny_model, *arguments, kv_tokens=8192) as client:
        state = json.loads(client.get("/server_info"))["internal_states"][0]["canopy_chunks"]
        assert state["fused_requests"] == 3
        assert state["reused_tokens"] > 0
        assert state["fallbacks"] == 0
        assert all(tier["chunks"] == 0 for tier in state["store"]["tiers"].values())
        log = client.server.log_text()
        assert "warm-up of chunk reuse: 3 prompts fused" in log
        listed = json.loads(client.get("/canopy/chunks"))
        assert listed["documents"] == []
