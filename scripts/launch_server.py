"""Start a real SGLang server, wait until it answers, and make sure that it stops.

Used by the quick start, the end-to-end tests and the benchmarks. It does not depend on policies:
the caller gives the server's own arguments.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_canopy.errors import CanopyError

# Texts in the log during a start, in order, and the stage that each begins. A progress bar counts them.
START_MILESTONES = (
    ("server_args=", "arguments"),
    ("Init torch distributed begin", "scheduler"),
    ("Load weight begin", "weights"),
    ("KV Cache is allocated", "KV cache"),
    ("Uvicorn running", "HTTP"),
    ("The server is fired up", "ready"),
)
STOP_WAIT_S = 10.0  # from SIGTERM to SIGKILL
# A client that reuses a connection in the moment in which the server closes it loses its request;
# at SGLang's 5 s of idleness that happens in every replay with pauses.
SERVER_ENVIRONMENT = {"SGLANG_TIMEOUT_KEEP_ALIVE": "300"}


@dataclass(slots=True)
class ServerProcess:
    """A running server: its address, its log and its process group."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def stop(self, patience_s: float = STOP_WAIT_S) -> None:
        """End every process of the server: SIGTERM, after ``patience_s`` SIGKILL.

        Safe to call twice.
        """
        for signal_number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, STOP_WAIT_S)):
            if not _signal_group(self.process.pid, signal_number):
                break
            deadline = time.monotonic() + wait_s
            while _signal_group(self.process.pid, 0) and time.monotonic() < deadline:
                self.process.poll()  # reap the leader, or its group never empties
                time.sleep(0.05)
        self.process.wait()


@contextlib.contextmanager
def serving(
    arguments: Sequence[str],
    *,
    log: Path,
    port: int,
    host: str = "127.0.0.1",
    environment: Mapping[str, str] | None = None,
    deadline_s: float = 300.0,
    patience_s: float = STOP_WAIT_S,
    describe: str | None = None,
    start: Any = subprocess.Popen,
) -> Iterator[ServerProcess]:
    """Run `python -m sglang.launch_server ARGUMENTS` until the block ends.

    `environment` is added to this process's; `describe` names a progress bar (none without it).
    `start` is called as `subprocess.Popen` is.
    SGLang looks for a SIGTERM every five seconds: with a shorter `patience_s` it is killed.
    Raises CanopyError, with the log's tail, if the server ends or is not ready by the deadline.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    command += ["--host", host, "--port", str(port)]
    with log.open("wb") as output:
        process = start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**SERVER_ENVIRONMENT, **os.environ, **(environment or {})},
            start_new_session=True,
        )
    server = ServerProcess(f"http://{host}:{port}", log, process)
    try:
        wait_until_ready(server, deadline_s, describe)
        yield server
    finally:
        server.stop(patience_s)


def wait_until_ready(server: ServerProcess, deadline_s: float, describe: str | None = None) -> None:
    """Return once `/health` answers 200. Raises CanopyError as `serving` does."""
    deadline = time.monotonic() + deadline_s
    with tqdm(
        total=len(START_MILESTONES),
        desc=describe,
        bar_format="{desc}: |{bar}| {n_fmt}/{total_fmt} [{elapsed}]{postfix}",
        disable=describe is None,
        leave=False,
    ) as bar:
        while True:
            log_text = server.log_text()
            reached = sum(marker in log_text for marker, _ in START_MILESTONES)
            if reached != bar.n or sys.stderr.isatty():  # a log file gets one line a stage
                bar.n = reached
                bar.set_postfix_str(START_MILESTONES[min(reached, len(START_MILESTONES) - 1)][1])
            if server.process.poll() is not None:
                raise CanopyError(
                    f"the server stopped with status {server.process.returncode} before it was "
                    f"ready; {_tail(server)}"
                )
            if is_healthy(server.url):
                return
            if time.monotonic() > deadline:
                tail = _tail(server)
                raise CanopyError(f"the server was not ready after {deadline_s:.0f} s; {tail}")
            time.sleep(0.2)


def is_healthy(url: str, timeout_s: float = 5.0) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def post(url: str, body: Any = None, timeout_s: float = 600.0) -> Any:
    """Send ``body`` as JSON. Returns the answer's JSON, or its text if it is none.

    Raises urllib.error.HTTPError for a refusal.
    """
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith(("{", "[")) else text


def add_plugin(folder: Path, name: str, entry: str, modules: Path | None = None) -> dict[str, str]:
    """Write a plugin of SGLang's into ``folder``. Returns the PYTHONPATH of servers that load it.

    ``entry``: ``MODULE:FUNCTION``; ``modules``: folder of the module, unless it is installed.
    """
    info_folder = folder / f"{name}-0.dist-info"
    info_folder.mkdir()
    (info_folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info_folder / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {entry}\n")
    paths = (folder, modules, os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(str(path) for path in paths if path)}


def free_port() -> int:
    """Return a free port below the system's range for clients.

    Any connection could take a port of that range before a server, which starts for a minute, binds
    it; SGLang would then wait for two minutes and exit. Raises CanopyError if 100 ports in a row
    are in use.
    """
    first_client_port = _first_client_port()
    rng = random.SystemRandom()  # processes that fork agree on no sequence
    for _ in range(100):
        port = rng.randrange(max(1024, first_client_port - 20_000), first_client_port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise CanopyError(f"no free port: 100 below {first_client_port} were taken")


def _first_client_port() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
        return max(2048, int(text.split()[0]))
    except (OSError, ValueError, IndexError):  # not Linux
        return 32_768


def cpu_dtype() -> str:
    """Return ``bfloat16`` if this processor multiplies it in hardware, else ``float32``.

    Without such instructions bfloat16 is emulated, at about half the speed of float32.
    """
    import torch

    capabilities = torch.cpu.get_capabilities()
    in_hardware = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return "bfloat16" if in_hardware else "float32"


def cpu_arguments(model: Path, *, kv_tokens: int, dtype: str | None = None) -> list[str]:
    """Return the arguments of a server on a CPU: a bounded KV pool, and no busy waiting while idle.

    ``dtype`` defaults to ``cpu_dtype()``.
    """
    return [
        *("--model-path", str(model), "--device", "cpu", "--dtype", dtype or cpu_dtype()),
        *("--max-total-tokens", str(kv_tokens), "--disable-overlap-schedule", "--sleep-on-idle"),
        *("--enable-cache-report", "--enable-metrics"),
    ]


def _signal_group(pid: int, signal_number: int) -> bool:
    """Send a signal to the process group; False when nothing is left of it."""
    try:
        os.killpg(pid, signal_number)
    except ProcessLookupError:
        return False
    return True


def _tail(server: ServerProcess, lines: int = 25) -> str:
    text = "\n".join(server.log_text().splitlines()[-lines:])
    return f"the end of its log {server.log}:\n{text}"
