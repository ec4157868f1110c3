"""``sglang.Engine`` reads no command line: what that refuses is refused there as well."""

import subprocess
import sys

import pytest

START = """
import sys, sglang
if __name__ == "__main__":
    sglang.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", load_format="dummy",
        max_total_tokens=1024, disable_overlap_schedule=True,
        radix_eviction_policy="wa", enable_streaming_session=True,
    )
"""


@pytest.mark.long
def test_an_engine_with_a_refused_option_stops_with_its_name(tiny_model, tmp_path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    command = [sys.executable, str(script), str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode != 0
    said = "sglang-canopy: --radix-eviction wa: --enable-streaming-session keeps KV outside"
    assert said in done.stdout + done.stderr
