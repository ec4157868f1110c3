"""Gateways in front of SGLang, started from their packages, and workers for them.

No server may depend on them: install them into a folder of their own.

    pip install --no-deps --target FOLDER sglang-router==0.3.2 smg==1.13.0
    CANOPY_GATEWAYS=FOLDER python -m pytest test/request/test_gateways.py
"""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launch_server import free_port

GATEWAYS_VARIABLE = "CANOPY_GATEWAYS"
VERSIONS = {"sglang-router": "0.3.2", "smg": "1.13.0"}
MODULES = {"sglang-router": "sglang_router", "smg": "smg"}
READY_TIMEOUT_S = 300.0


def skip_without(gateway: str) -> None:
    """Skip the calling test, with the reason, if ``gateway`` is not installed."""
    folder = os.environ.get(GATEWAYS_VARIABLE)
    is_in_folder = folder is not None and (Path(folder) / MODULES[gateway]).is_dir()
    if not is_in_folder and importlib.util.find_spec(MODULES[gateway]) is None:
        pytest.skip(
            f"{gateway} is not installed: pip install --no-deps --target FOLDER "
            f"{gateway}=={VERSIONS[gateway]}, and set {GATEWAYS_VARIABLE}=FOLDER"
        )


@contextlib.contextmanager
def run_gateway(gateway: str, workers: list[str], log: Path, *flags: str) -> Iterator[str]:
    """Run the gateway in front of ``workers``, their URLs; yield its own URL."""
    skip_without(gateway)
    port, metrics_port = free_port(), free_port()
    import_folders = [os.environ.get(GATEWAYS_VARIABLE, ""), os.environ.get("PYTHONPATH", "")]
    command = [
        *(sys.executable, "-m", f"{MODULES[gateway]}.launch_router", "--worker-urls", *workers),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)),
        *("--policy", "round_robin", *flags),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, import_folders))},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _is_ready(url):
            assert process.poll() is None, log.read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=2):
            return True
    except OSError:
        return False


class Post(NamedTuple):
    path: str
    headers: dict[str, str]
    """Names are in lower case."""
    body: dict[str, Any]


class FakeWorker:
    """A server that answers like SGLang's and records its requests."""

    def __init__(self) -> None:
        self.posts: list[Post] = []
        worker = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                if self.path.startswith("/v1/models"):
                    models = [{"id": "tiny", "object": "model", "owned_by": "sglang"}]
                    self.reply({"object": "list", "data": models})
                elif self.path.startswith("/version"):
                    self.reply({}, 404)
                else:
                    self.reply({"model_path": "tiny", "served_model_name": "tiny", "tp_size": 1})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                worker.posts.append(Post(self.path, headers, json.loads(body or b"{}")))
                self.reply(_COMPLETION)

            def reply(self, answer: Any, status: int = 200) -> None:
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


_COMPLETION = {
    "id": "x",
    "object": "chat.completion",
    "created": 0,
    "model": "tiny",
    "text": "hi",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "meta_info": {"id": "x", "finish_reason": {"type": "stop"}, "cached_tokens": 0},
}


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Return the status and the JSON answer; ``None`` for an answer that is no JSON."""
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, json.dumps(body).encode(), all_headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            status, answer_bytes = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, answer_bytes = error.code, error.read()
    try:
        return status, json.loads(answer_bytes)
    except ValueError:
        return status, None
