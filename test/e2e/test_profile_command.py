"""``canopy profile`` on a real server, and the simulator with what it wrote."""

from __future__ import annotations

from sglang_canopy.cli.main import main
from sglang_canopy.sim.system import SystemConfig, load_profile, simulate_system
from sglang_canopy.trace.record import TraceRequest


def test_a_measured_profile_simulates(shared_server, tiny_model, tmp_path, capsys):
    client = shared_server(tiny_model)
    out = tmp_path / "profile.json"
    limits = ["--max-prompt", "256", "--max-context", "256", "--max-batch", "2", "--repeats", "1"]
    assert main(["profile", "--url", client.url, "--output", str(out), *limits]) == 0
    assert "prefill of" in capsys.readouterr().out
    profile = load_profile(out, model=tiny_model.name)
    assert profile.source == "measured"
    assert profile.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4  # k and v, layers, heads, size, float32
    assert profile.layers == 1  # on a CPU nothing is copied beside the computing
    trace = [TraceRequest(0.0, 128, 8, tuple(range(8)), 16)]
    result = simulate_system(trace, SystemConfig(device_tokens=4096), profile)
    assert 0 < result.mean_ttft_s < result.mean_e2e_s
