"""Files and functions on a request's path, from its HTTP body to the evicted victim.

    python benchmark/golden/trace_request.py               # counts, then the functions in order
    python benchmark/golden/trace_request.py --way server  # through SGLang's scheduler, with a model
    python benchmark/golden/trace_request.py --way simulate  # through `canopy simulate`
    python benchmark/golden/trace_request.py --json OUT    # the same for a program
    python benchmark/golden/trace_request.py --markdown    # a numbered list for a page

A chat with a category is stamped, announced to the tree, matched and inserted, which evicts others: by
hand into SGLang's cache (way_tree.py), through a whole server in this process (way_server.py), or as a
request of a trace (way_simulate.py). Only the project's functions in the serving thread are counted,
without the code that runs SGLang's layers on a CPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paths import use_checkout
from tracer import Traced, Tracer

WAYS = ("tree", "server", "simulate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--way", choices=WAYS, default=WAYS[0], help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write what was found")
    parser.add_argument("--markdown", action="store_true", help="print a list for a page")
    args = parser.parse_args()
    use_checkout()
    found: Tracer = importlib.import_module(f"way_{args.way}").trace()
    assert any(t.name.endswith(".victim") for t in found.functions), "nothing was evicted"
    if args.json:
        args.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
    print(as_markdown(found) if args.markdown else as_text(found))
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads would keep the process


def as_json(found: Tracer) -> dict[str, Any]:
    """Counts, and the functions in the order of their first calls."""
    calls: Counter[str] = Counter()
    for traced in found.functions:
        calls[traced.file] += traced.calls
    return {
        "files": len(found.files),
        "functions": len(found.functions),
        "calls": found.calls,
        "calls_by_file": {file: calls[file] for file in found.files},
        "order": [asdict(traced) for traced in found.functions],
    }


def as_text(found: Tracer) -> str:
    """For a terminal: indented by depth."""
    lines = [f"{len(found.files)} files, {len(found.functions)} functions, {found.calls} calls"]
    stage = ""
    for traced in found.functions:
        if traced.stage != stage:
            stage = traced.stage
            lines += ["", f"{stage}:"]
        times = f" x{traced.calls}" if traced.calls > 1 else ""
        lines.append(f"{'  ' * traced.depth}{traced.file}:{traced.line} {traced.name}{times}")
    return "\n".join(lines)


def as_markdown(found: Tracer) -> str:
    """For a page: the first function of each file that is reached, with its docstring."""
    firsts: dict[str, Traced] = {}
    for traced in found.functions:
        firsts.setdefault(traced.file, traced)
    lines = [f"{i}. `{t.file}` `{t.name}`{_about(t)}" for i, t in enumerate(firsts.values(), 1)]
    return "\n".join(lines)


def _about(traced: Traced) -> str:
    return f": {traced.about}" if traced.about else ""


if __name__ == "__main__":
    main()
