"""Start a server whose Canopy hooks and tree are timed on the scheduler's thread.

    python benchmark/security/hook_clocks.py FILE ARGUMENT...

The arguments are those of ``sglang.launch_server``. Each second the scheduler writes to ``FILE`` one
row per hook (``hooks``) and the thread's CPU time (``thread_s``). SGLang functions called from a hook
do not count. Rows under ``TREE_PREFIX`` are whole calls of Canopy's tree, including the work of SGLang's
tree. Background encoding of documents has a row under ``COMPUTED_PREFIX``.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TREE_PREFIX = "radix."
COMPUTED_PREFIX = "computed."
FILE_VARIABLE = "CANOPY_HOOK_CLOCKS"
_SCHEDULER_MODULES = ("managers.schedule", "mem_cache.unified_radix_cache.", "mem_cache.common.")

clock_rows: dict[str, dict[str, float]] = {}
computed_s = 0.0
"""CPU time of all computation, subtracted from the hooks around it."""


def _record_call(name: str, start_s: float, excluded_s: float = 0.0) -> float:
    end_s = time.thread_time()
    row = clock_rows.setdefault(name, {"calls": 0, "cpu_s": 0.0, "longest_s": 0.0})
    row["calls"] += 1
    row["cpu_s"] += end_s - start_s - excluded_s
    row["longest_s"] = max(row["longest_s"], end_s - start_s - excluded_s)
    row["thread_s"] = end_s
    return end_s - start_s


@functools.cache  # a hook is in place if SGLang holds this very object
def time_hook(name: str, hook: Callable[..., Any], is_around: bool = False) -> Callable[..., Any]:
    """Wrap ``hook`` to add its CPU time to ``clock_rows[name]``.

    ``is_around``: the first argument is SGLang's function, whose time is subtracted.
    """

    @functools.wraps(hook)
    def timed_call(*args: Any, **kwargs: Any) -> Any:
        sglang_s = 0.0
        if is_around:
            original = args[0]

            def count_original(*args: Any, **kwargs: Any) -> Any:
                nonlocal sglang_s
                original_start_s = time.thread_time()
                try:
                    return original(*args, **kwargs)
                finally:
                    sglang_s += time.thread_time() - original_start_s

            args = (count_original, *args[1:])
        computed_before_s, start_s = computed_s, time.thread_time()
        try:
            return hook(*args, **kwargs)
        finally:
            _record_call(name, start_s, sglang_s + computed_s - computed_before_s)

    return timed_call


def _time_computation(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed_computation(*args: Any, **kwargs: Any) -> Any:
        global computed_s
        start_s = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            computed_s += _record_call(COMPUTED_PREFIX + name, start_s)

    return timed_computation


def make_report() -> dict[str, Any]:
    hooks = {name: dict(row) for name, row in list(clock_rows.items())}
    return {"thread_s": max((r["thread_s"] for r in hooks.values()), default=0.0), "hooks": hooks}


def wrap_hooks() -> None:
    """Time the hooks of each table that is made from here on."""
    from sglang_canopy.server.start.hook import Hook

    original = Hook.__init__

    def timed_init(
        self: Hook, target: str, kind: str, hook: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        name = target.removeprefix("sglang.srt.")
        if name.endswith("default_radix_cache_factory"):
            hook = _time_building(hook)
        elif name.startswith(_SCHEDULER_MODULES) and not name.endswith("__init__"):
            hook = time_hook(name.removeprefix("managers."), hook, kind == "around")
        original(self, target, kind, hook, *args, **kwargs)

    Hook.__init__ = timed_init  # type: ignore[assignment,method-assign]


def _time_building(build: Callable[..., Any]) -> Callable[..., Any]:
    """Time the tree and background work, and begin to write, in the process that builds the cache."""

    def timed_build(original: Any, ctx: Any) -> Any:
        from canopy_documents.server.engine import DocumentEngine
        from sglang_canopy.radix.cache import CanopyRadixCache
        from sglang_canopy.radix.core import CanopyTreeCore

        for owner, name in (
            (CanopyTreeCore, "match_prefix"),
            (CanopyTreeCore, "begin_insert"),
            (CanopyTreeCore, "_insert_walk_step"),
            (CanopyRadixCache, "_evict_components"),
        ):
            setattr(owner, name, time_hook(TREE_PREFIX + name.strip("_"), getattr(owner, name)))
        idle = _time_computation("documents when idle", DocumentEngine.work_when_idle)
        DocumentEngine.work_when_idle = idle  # type: ignore[method-assign]
        path = Path(os.environ[FILE_VARIABLE])
        threading.Thread(target=_write_reports, args=(path,), daemon=True).start()
        return build(original, ctx)

    return timed_build


def clocked_start(clocks_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Return a ``start`` for ``launch_server.serving`` that starts this file, with its clocks in ``clocks_path``."""

    def start(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([command[0], __file__, str(clocks_path), *command[3:]], **kwargs)

    return start


def _write_reports(path: Path) -> None:
    while True:
        time.sleep(1.0)
        partial_file = path.with_suffix(".part")
        partial_file.write_text(json.dumps(make_report()))
        partial_file.replace(path)


if __name__ in ("__main__", "__mp_main__"):
    wrap_hooks()  # SGLang's schedulers are spawned, and import this file again

if __name__ == "__main__":
    os.environ[FILE_VARIABLE] = sys.argv.pop(1)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
