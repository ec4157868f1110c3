"""Run a module of ``support`` as a process. Its result is its last line, as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def worked(
    module: str,
    model: Path,
    *arguments: str,
    patience_s: float,
    given: Any = None,
    **environment: str,
) -> Any:
    """Run it with ``given`` as JSON on standard input. A failure shows the end of its log."""
    done = subprocess.run(
        [sys.executable, "-m", f"support.{module}", str(model), *arguments],
        cwd=TESTS,
        env={**os.environ, **environment},
        input=None if given is None else json.dumps(given),
        capture_output=True,
        text=True,
        timeout=patience_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
