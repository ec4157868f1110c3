"""A server that receives SIGTERM writes the KV that only its memory holds; the next one serves it from disk."""

import json
import os
import signal
from pathlib import Path

import pytest

SHARED = [900 + 3 * i for i in range(64)]
PROMPTS = [[*SHARED, *(1000 + 977 * k + 7 * i for i in range(200))] for k in range(4)]


@pytest.mark.long
def test_a_conversation_continues_after_sigterm_and_restart(server, tiny_model, tmp_path: Path):
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    flags = (
        *("--page-size", "16", "--radix-eviction", "wa"),
        *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
        *("--hicache-write-policy", "write_back"),
        *("--hicache-storage-backend", "canopy"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    )
    with server(tiny_model, *flags, kv_tokens=4096, ready_s=1000.0) as client:
        said = [client.generate(prompt, 8)["output_ids"] for prompt in PROMPTS]
        assert json.loads(client.get("/canopy/status"))["ranks"][0]["disk"]["pages"] == 0
        # Only the HTTP process: what Kubernetes and docker stop signal.
        os.kill(client.server.process.pid, signal.SIGTERM)
        client.server.process.wait(timeout=120)
        log = client.server.log_text()
    assert "0 pages are lost" in log, log[-2000:]
    assert [f.stat().st_mode & 0o777 for f in (tmp_path / "disk").glob("*/learnt.json")] == [0o600]
    with server(tiny_model, *flags, kv_tokens=4096, ready_s=1000.0) as client:
        for prompt, before in zip(PROMPTS, said):
            answer = client.generate(prompt, 8)
            assert answer["output_ids"] == before
            details = answer["meta_info"]["cached_tokens_details"]
            assert details["device"] + details["host"] + details["storage"] == 256
        again = client.generate([*PROMPTS[0], *said[0], *PROMPTS[1][-32:]], 1)["meta_info"]
        assert again["cached_tokens"] >= 256
