"""``canopy documents calibrate --url`` on a real server, and a server that starts with its result."""

import json

import pytest

from canopy_lab.cli.main import main
from support.chunk_client import on


@pytest.mark.long
@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_a_ratio_is_found_through_the_server_and_used_by_the_next(
    server, tiny_model, tmp_path, tier
) -> None:
    out = tmp_path / "calibration.json"
    keys: dict = {"selector": "frequency"}
    if tier == "disk":
        keys |= {"memory_mb": 0, "disk_mb": 64, "directory": str(tmp_path / "chunks")}
    small = ["--prompts", "2", "--repeats", "1", "--chunks", "4", "--chunk-tokens", "64"]
    with server(tiny_model, *on(**keys), kv_tokens=8192) as client:
        assert main(["documents", "calibrate", "--url", client.url, "--out", str(out), *small]) == 0
    (entry,) = json.loads(out.read_text()).values()
    assert entry["tier"] == tier
    assert 0.15 <= entry["ratio"] <= 1.0
    assert entry["backend"] == "torch_native"
    assert entry["dtype"] == "float32"
    if tier == "disk":
        return
    with server(tiny_model, *on(**keys, calibration=str(out)), kv_tokens=8192) as client:
        state = json.loads(client.get("/server_info"))["internal_states"][0]["canopy_chunks"]
        assert state["ratios"] == {"host": entry["ratio"]}
