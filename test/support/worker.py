"""Run a function of a module of ``support`` on SGLang's scheduler in a process of its own.

    cd test && python -m support.worker MODULE:FUNCTION MODEL GIVEN ARGUMENT...

The function receives ``start``, which makes the scheduler with the server's arguments, and the JSON object
``GIVEN`` as keywords. Its result is the last line, as JSON.
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from support import forked


def worked(
    function: str,
    model: Path,
    *arguments: str,
    patience_s: float,
    environment: dict[str, str] | None = None,
    **given: Any,
) -> Any:
    """Return the function's result. A failure shows the end of its log."""
    named = [function, str(model), json.dumps(given)]
    done = forked.run(
        [sys.executable, "-m", "support.worker", *named, *arguments],
        cwd=forked.TESTS,
        env={**os.environ, **(environment or {})},
        timeout=patience_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(function: str, model: str, given: str, *arguments: str) -> None:
    import torch

    from support.scheduler import InProcess

    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(f"support.{module}"), name)
    with torch.no_grad():
        found = work(lambda: InProcess(Path(model), list(arguments)), **json.loads(given))
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads would keep this process


if __name__ == "__main__":
    main(*sys.argv[1:])
