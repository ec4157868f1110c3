"""Canopy's routes behind SGLang's own check of keys."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_canopy.config.server_options import ATTRIBUTE, RequestOptions, ServerOptions
from sglang_canopy.wire.hints import WaitingHints
from support.served_routes import HttpClient, RecordingManager, Serve


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Start the routes: ``with serve(api_key=..., admin_api_key=..., hints="on") as http:``."""
    import uvicorn
    from fastapi import FastAPI
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import add_api_key_middleware

    from canopy_documents import ATTRIBUTE as DOCUMENT_ATTRIBUTE
    from canopy_documents.plugin import hooks as document_hooks
    from canopy_documents.server import options
    from sglang_canopy.server.http import entry, routes

    monkeypatch.setattr(routes, "waiting_hints", WaitingHints())

    @contextlib.contextmanager
    def serve_routes(
        api_key: str | None = None,
        admin_api_key: str | None = None,
        hints: str = "on",
        is_worker: bool = False,
        **arguments: Any,
    ) -> Iterator[HttpClient]:
        app, manager = FastAPI(), RecordingManager()
        monkeypatch.setattr(entry, "http_state", entry.http_state)  # add_routes sets another
        monkeypatch.setattr(http_server, "app", app)
        http_state = SimpleNamespace(tokenizer_manager=manager)
        monkeypatch.setattr(http_server, "_global_state", http_state)
        server_args = SimpleNamespace(
            **{"radix_eviction_policy": "wa", "radix_eviction_policy_config": None} | arguments,
            api_key=api_key,
            admin_api_key=admin_api_key,
            **{ATTRIBUTE: ServerOptions(RequestOptions(client_hints=hints))},
            **{DOCUMENT_ATTRIBUTE: options.ReuseOptions()},
        )
        if is_worker:  # SGLang adds no middleware there
            routes.add_worker_routes(server_args)
        else:
            routes.add_routes(server_args)
        document_hooks.add_routes()
        if (api_key or admin_api_key) and not is_worker:
            add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        sock = server.config.bind_socket()
        sock.listen()
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        thread.start()
        try:
            yield HttpClient(sock.getsockname()[1], manager)
        finally:
            server.should_exit = True
            thread.join(30)
            sock.close()

    return serve_routes
