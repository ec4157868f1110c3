"""The HTTP application of a server with several tokenizer workers (``--tokenizer-worker-num``).

SGLang starts each worker as a process of uvicorn's that imports an application by its name and
loads no plugins. ``tokenizer_workers`` names this one: importing it loads the plugins and adds
Canopy's routes.

A worker stamps its requests itself. Stamps are of the machine's monotonic clock, which is one for
all of its processes; in which order requests of several workers count says the scheduler that
receives them.
"""

from __future__ import annotations

from typing import Any

from sglang_canopy.errors import CanopyError


def __getattr__(name: str) -> Any:
    """``app``, made when uvicorn asks for it: SGLang's, with Canopy's routes."""
    if name != "app":
        raise AttributeError(name)
    made = globals()["app"] = _make_app()
    return made


def _make_app() -> Any:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.multi_tokenizer_mixin import (
        get_main_process_id,
        read_from_shared_memory,
    )

    from sglang_canopy.server.http import routes
    from sglang_canopy.server.start.seams import SEAMS
    from sglang_canopy.server.start.self_check import check_in_place, stop

    check_in_place(SEAMS)
    # As SGLang's own workers do when they start; written by the process that launched this one.
    _, server_args, _ = read_from_shared_memory(f"multi_tokenizer_args_{get_main_process_id()}")
    try:
        routes.add_worker_routes(server_args)
    except CanopyError as error:
        stop(str(error))
    return app
