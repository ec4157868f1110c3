"""The HTTP application of a server with several tokenizer workers (``--tokenizer-worker-num``).

SGLang starts each worker as a uvicorn process that imports an application by name and loads no plugins.
``routes.use_our_application`` sets the name of this module, which loads the plugins and adds Canopy's routes on
import.

Each worker stamps its own requests. Stamps use the machine's monotonic clock, which all processes share.
The receiving scheduler determines the order of requests from several workers.
"""

from __future__ import annotations

from typing import Any

from sglang_canopy.errors import CanopyError


def __getattr__(name: str) -> Any:
    """Create ``app`` on first access: SGLang's application with Canopy's routes."""
    if name != "app":
        raise AttributeError(name)
    application = globals()["app"] = _make_app()
    return application


def _make_app() -> Any:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers.multi_tokenizer_mixin import (
        get_main_process_id,
        read_from_shared_memory,
    )

    from sglang_canopy.server.http import routes
    from sglang_canopy.server.start.hooks import HOOKS
    from sglang_canopy.server.start.self_check import check_in_place, stop

    check_in_place(HOOKS)
    # Read the arguments as SGLang's workers do; the launching process wrote them.
    _, server_args, _ = read_from_shared_memory(f"multi_tokenizer_args_{get_main_process_id()}")
    try:
        routes.add_worker_routes(server_args)
    except CanopyError as error:
        stop(str(error))
    return app
