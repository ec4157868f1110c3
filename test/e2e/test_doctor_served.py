"""`canopy doctor` against started servers: the same parts of `auto` are on or off for the same reasons."""

import json
import subprocess
import sys

import pytest

from launch_server import cpu_arguments

SLOW_MACHINE = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}
"""SGLang ends a worker that imports for longer than ten seconds."""
LINES = {
    "lpm, host tier": ("--schedule-policy", "lpm", "--enable-hierarchical-cache"),
    "two workers": ("--tokenizer-worker-num", "2"),
    "by hand": ("--canopy-queue-order", "sglang", "--canopy-whatif", "wa,floor=off"),
}


@pytest.mark.long
@pytest.mark.parametrize("line", LINES)
def test_a_started_server_has_the_parts_that_the_doctor_listed(server, tiny_model, line) -> None:
    flags = ("--radix-eviction", "auto", *LINES[line])
    words = ["sglang", "serve", *cpu_arguments(tiny_model, kv_tokens=4096), *flags]
    done = subprocess.run(
        [sys.executable, "-m", "canopy_lab.cli.main", "doctor", "--json", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = json.loads(done.stdout)["auto"]
    with server(tiny_model, *flags, environment=SLOW_MACHINE) as client:
        client.generate([5, 6, 7, 8] * 20, 2)
        status = json.loads(client.get("/canopy/status"))
        while not status["ranks"]:  # written once a second
            status = json.loads(client.get("/canopy/status"))
    assert status["auto_parts"] == said
    assert any(not part["active"] for part in said)
