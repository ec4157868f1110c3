"""Run a function of a module of ``support`` on SGLang's scheduler in a process of its own.

    cd test && python -m support.worker MODULE:FUNCTION MODEL KEYWORDS ARGUMENT...

The function receives ``start``, which makes the scheduler with the server's arguments, and the JSON object
``KEYWORDS``. Its result is the last line, as JSON.
"""

import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from support import forked


def run_in_scheduler_process(
    function: str,
    model: Path,
    *arguments: str,
    timeout_s: float,
    environment: dict[str, str] | None = None,
    **keywords: Any,
) -> Any:
    """Return the result of ``MODULE:FUNCTION``. Raises AssertionError with the end of its log."""
    positional = [function, str(model), json.dumps(keywords)]
    process = forked.run(
        [sys.executable, "-m", "support.worker", *positional, *arguments],
        cwd=forked.TESTS,
        env={**os.environ, **(environment or {})},
        timeout=timeout_s,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def main(function: str, model: str, keywords: str, *arguments: str) -> None:
    import torch

    from support.scheduler import SteppedScheduler

    module_name, _, function_name = function.partition(":")
    scenario = getattr(importlib.import_module(f"support.{module_name}"), function_name)
    with torch.no_grad():
        start = functools.partial(SteppedScheduler, Path(model), list(arguments))
        print(json.dumps(scenario(start, **json.loads(keywords))))
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads would keep this process


if __name__ == "__main__":
    main(*sys.argv[1:])
