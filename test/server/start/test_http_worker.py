"""The application that tokenizer workers import: made in a process of its own, as uvicorn does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

WORKER_PROGRAM = """
import json, multiprocessing, sys

def worker():
    import importlib
    from sglang_canopy.config.setups import HTTP_APPS
    module, _, name = HTTP_APPS[1].partition(":")
    app = getattr(importlib.import_module(module), name)
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang_canopy.server.http import entry
    from sglang_canopy.server.start import hooks
    stamps = [s for s in hooks.HOOKS if s.target.endswith("TokenizerManager.generate_request")]
    print("FOUND " + json.dumps({
        "routes": sorted({getattr(r, "path", "") for r in app.router.routes}),
        "stamps": all(s.is_in_place() for s in stamps) and bool(stamps),
        "hints": entry.http_state.hint_rule.mode,
        "middleware": len(app.user_middleware),
    }), flush=True)

if __name__ == "__main__":
    import os
    from sglang.srt.managers.multi_tokenizer_mixin import write_to_shared_memory
    from sglang.srt.server_args import ServerArgs
    server_args = ServerArgs(model_path="dummy", device="cpu", tokenizer_worker_num=2,
                       radix_eviction_policy="wa", admin_api_key=sys.argv[1] or None)
    from sglang_canopy.config.server_options import RequestOptions, ServerOptions
    server_args._canopy_options = ServerOptions(RequestOptions(client_hints="off"))
    memory = write_to_shared_memory((None, server_args, {}), f"multi_tokenizer_args_{os.getpid()}")
    child = multiprocessing.get_context("spawn").Process(target=worker)
    child.start()
    child.join()
    memory.unlink()
    sys.exit(child.exitcode)
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_worker_has_our_hooks_and_routes(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(WORKER_PROGRAM)
    command = [sys.executable, str(script), "key"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    lines = [line for line in process.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, process.stdout[-1000:] + process.stderr[-3000:]
    worker = json.loads(lines[0].removeprefix("FOUND "))
    assert {"/canopy/hint", "/canopy/status"} <= set(worker["routes"])
    assert worker["stamps"]
    assert worker["hints"] == "off"
    assert worker["middleware"] >= 1, "no middleware checks the administrator's key"
