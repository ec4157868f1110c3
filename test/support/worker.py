"""Run a module of ``support`` as a process. Its result is its last line, as JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from support import forked


def worked(
    module: str,
    model: Path,
    *arguments: str,
    patience_s: float,
    given: Any = None,
    **environment: str,
) -> Any:
    """Run it with ``given`` as JSON on standard input. A failure shows the end of its log."""
    done = forked.run(
        [sys.executable, "-m", f"support.{module}", str(model), *arguments],
        cwd=forked.TESTS,
        env={**os.environ, **environment},
        input=None if given is None else json.dumps(given),
        timeout=patience_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
