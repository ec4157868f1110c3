"""Fixtures of a real Mooncake master and store on loopback; docs/guide/mooncake.md names the wheel."""

import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launch_server import free_port
from support.served import wait_until

PAGE_TOKENS = 16
KV_LEASE_MS = 200
SEGMENT_BYTES = 32 << 20

STORE_PROGRAM = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"setup gave {code}", flush=True)
objects = 0
for line in sys.stdin:
    done = 0
    for _ in range(int(line)):
        done += store.put(f"filler-{objects}", bytes(64 << 10)) == 0
        objects += 1
    print(f"stored {done}", flush=True)
"""
"""Gives memory to the cluster. For each input line, a number, stores that many objects of 64 KiB."""


@pytest.fixture(scope="module")
def mooncake_folder() -> Path:
    """The installed package's folder."""
    command = [sys.executable, "-c", "import mooncake.store, mooncake; print(mooncake.__path__[0])"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        reason = process.stderr.strip().splitlines()[-1]
        pytest.skip(f"Mooncake does not load here ({reason}); see docs/guide/mooncake.md")
    return Path(process.stdout.strip().splitlines()[-1])


@dataclass(slots=True)
class Cluster:
    """One master and one store."""

    address: str
    metrics_url: str
    store_process: subprocess.Popen[str]

    def read_metric(self, name: str) -> int:
        """Return a value of the master's metrics."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            text = answer.read().decode()
        return int(float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1]))

    def fill(self, object_count: int) -> int:
        """Store unpinned objects of 64 KiB. Return how many the cluster accepted at once."""
        self.store_process.stdin.write(f"{object_count}\n")
        self.store_process.stdin.flush()
        return int(read_line_starting(self.store_process, "stored ")[7:])

    def client_config(self) -> dict[str, Any]:
        """Return the configuration of a client of the cluster."""
        return {
            "master_server_address": self.address,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
        }

    def flags(self) -> tuple[str, ...]:
        return (
            *("--page-size", str(PAGE_TOKENS), "--enable-hierarchical-cache"),
            *("--hicache-size", "1", "--hicache-mem-layout", "page_first_direct"),
            *("--hicache-storage-backend", "mooncake"),
            *("--hicache-storage-backend-extra-config", json.dumps(self.client_config())),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
        )


def read_line_starting(process: subprocess.Popen[str], prefix: str) -> str:
    """The next line of the process that begins with `prefix`; the library logs between."""
    for line in process.stdout:
        if line.startswith(prefix):
            return line.strip()
    raise AssertionError(f"the store ended with {process.wait()}")


@pytest.fixture(scope="module")
def cluster(mooncake_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port, metrics_port = free_port(), free_port()
    log = (tmp_path_factory.mktemp("mooncake") / "master.log").open("wb")
    master_process = subprocess.Popen(
        [
            str(mooncake_folder / "mooncake_master"),
            *("-rpc_address=127.0.0.1", f"-rpc_port={port}"),
            *("-metrics_host=127.0.0.1", f"-metrics_port={metrics_port}"),
            f"-default_kv_lease_ttl={KV_LEASE_MS}",
        ],
        stdout=log,
        stderr=log,
    )
    store_process = None
    try:
        metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"

        def is_up() -> bool:
            assert master_process.poll() is None, Path(log.name).read_text()[-2000:]
            with contextlib.suppress(OSError):
                return urllib.request.urlopen(metrics_url, timeout=5).status == 200
            return False

        wait_until(is_up)
        store_process = subprocess.Popen(
            [sys.executable, "-c", STORE_PROGRAM, f"127.0.0.1:{port}", str(SEGMENT_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert read_line_starting(store_process, "") == "ready"
        yield Cluster(f"127.0.0.1:{port}", metrics_url, store_process)
    finally:
        for process in (store_process, master_process):
            if process is not None:
                process.kill()
                process.wait()
