"""SGLang's own sizing of its pool leaves out what chunk reuse needs: in SGLang's scheduler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TEST = Path(__file__).parents[2]
WORKER = """
import json, sys
from pathlib import Path
from support.scheduler_worker import InProcess
from canopy_chunks.server import model_view
from canopy_chunks.fuse.working_memory import working_memory

flags = "--canopy-chunks memory_mb=100,prompt_tokens=512".split()
scheduler = InProcess(Path(sys.argv[1]), flags, kv_tokens=4096).scheduler
runner = scheduler.tp_worker.model_runner
sizes = runner.kv_cache_configurator
shape = model_view.served_shape(runner.model, runner.model_config.hf_config)
needed = working_memory(shape, 4, 512, 100 << 20).total
free = needed + 1000 * shape.kv_bytes_per_token * 4
found = {}
found["on"] = sizes.config_from_budget(free).max_total_num_tokens
on = sizes.server_args._canopy_chunks
sizes.server_args._canopy_chunks = None
found["off"] = sizes.config_from_budget(free).max_total_num_tokens
sizes.server_args._canopy_chunks = on
try:
    sizes.config_from_budget(64 << 20)
except SystemExit as end:
    found["end"] = str(end)
print("FOUND", json.dumps(found))
"""


@pytest.mark.long
def test_sglangs_pool_is_smaller_by_the_reserved_memory(tiny_model) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(tiny_model)],
        cwd=TEST,
        env={**os.environ, "PYTHONPATH": f"{TEST}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("FOUND"))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["on"] == 1000
    assert found["off"] > 3000, "what was left out is more than that"
    assert "only 64 MiB are free" in found["end"]
    assert "canopy: chunk reuse leaves" in done.stdout + done.stderr
