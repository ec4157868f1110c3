"""A tenant's name is the secret that keeps its cache apart: nothing that a server shows has it."""

import hashlib
import json
import logging
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_canopy.server.http.routes import QueryFilter
from sglang_canopy.telemetry.metrics import Metrics
from sglang_canopy.telemetry.reporter import Reporter
from sglang_canopy.tenant import SHOWN_KEY_VARIABLE, new_shown_key, shown_tenant, tenant_of
from sglang_canopy.wire import status_file
from support.disk_tree import DiskTree

SALT, KEY = "the gateway's secret: 7f/3!", "customer&key"
TENANT_NAMES = [tenant_of(None, SALT), tenant_of(KEY, SALT), tenant_of(KEY, None)]


@pytest.fixture
def folder(tmp_path) -> Iterator[Path]:
    status_folder = status_file.make_folder()
    yield Path(status_folder.name)
    status_folder.cleanup()


def secrets_in(text: str) -> list[str]:
    """Return the salts, keys and names in a text: plain, as JSON, or hashed without a key."""
    secrets = [SALT, KEY, *(str(name) for name in TENANT_NAMES)]
    secrets += [json.dumps(secret)[1:-1] for secret in secrets]
    secrets += [hashlib.sha256(str(secret).encode()).hexdigest()[:16] for secret in secrets]
    return [secret for secret in secrets if secret in text]


def busy_tree(folder: Path) -> DiskTree:
    """Return a tree in which every tenant keeps, is awaited, and has rows and labels of its own."""
    tree = DiskTree(folder, tokens=400, host_tokens=400, policy="wa")
    tree.store.state.clock = lambda: 0.0
    for number, tenant in enumerate(TENANT_NAMES):
        path = [100 * number + i for i in range(20)]
        tree.serve(path, number + 1.0, tenant=tenant, category=f"c{number}", keep_until=90.0)
    for number, tenant in enumerate(TENANT_NAMES):
        request = tree.request(9.0, tenant=tenant)
        path = array("q", [100 * number + i for i in range(20)])
        match = tree.cache.match_prefix(MatchPrefixParams(key=RadixKey(path, None)))
        tree.core.protected.protect_match(tree.core.node_by_id(match.last_device_node), request)
    return tree


def test_no_salt_is_in_the_status_the_metrics_or_the_log(folder, tmp_path, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    tree = busy_tree(tmp_path / "disk")
    registry = CollectorRegistry()
    reporter = Reporter(tree.cache, 0, Metrics(0, registry=registry))
    status = reporter.report()
    assert [len(status[name]["tenants"]) for name in ("keep", "awaited")] == [3, 3]
    metrics_text = generate_latest(registry).decode()
    assert "canopy:requests_total" in metrics_text
    file_texts = [path.read_text() for path in folder.iterdir()]
    assert not secrets_in("".join([*file_texts, json.dumps(status_file.read_all()), metrics_text]))
    assert not secrets_in(caplog.text)
    tree.close()


def test_a_tenant_has_one_shown_name_in_all_parts_of_the_status(folder, tmp_path) -> None:
    tree = busy_tree(tmp_path / "disk")
    status = Reporter(tree.cache, 0, None).report()
    names = {shown_tenant(name) for name in TENANT_NAMES}
    assert len(names) == 3
    for rows in (status["keep"]["tenants"], status["awaited"]["tenants"]):
        assert {row["tenant"] for row in rows} == names
    tree.close()


def test_all_processes_of_a_server_show_a_tenant_equally(monkeypatch) -> None:
    monkeypatch.setenv(SHOWN_KEY_VARIABLE, "")
    new_shown_key()
    code = "from sglang_canopy.tenant import shown_tenant; print(shown_tenant('a'))"
    processes = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert {process.stdout.strip() for process in processes} == {shown_tenant("a")}


def test_another_server_shows_the_same_tenant_by_another_name(monkeypatch) -> None:
    monkeypatch.setenv(SHOWN_KEY_VARIABLE, "")
    shown_names = set()
    for _ in range(3):
        new_shown_key()
        shown_names.add(shown_tenant("a"))
    assert len(shown_names) == 3


def test_a_process_without_a_servers_key_has_one_of_its_own(monkeypatch) -> None:
    monkeypatch.delenv(SHOWN_KEY_VARIABLE, raising=False)
    assert shown_tenant("a") == shown_tenant("a") != shown_tenant("b")


@pytest.mark.parametrize(
    ("target", "logged_target"),
    [
        ("/canopy/documents?cache_salt=secret", "/canopy/documents"),
        ("/prefix/canopy/documents?extra_key=secret&x=1", "/prefix/canopy/documents"),
        ("/canopy/status", "/canopy/status"),
        ("/health?x=1", "/health?x=1"),
    ],
)
def test_the_access_log_has_no_query_of_canopys_routes(target, logged_target) -> None:
    arguments: tuple[Any, ...] = ("127.0.0.1:1", "GET", target, "1.1", 200)
    line = '%s - "%s %s HTTP/%s" %d'
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, line, arguments, None)
    assert QueryFilter().filter(record)
    assert record.getMessage() == f'127.0.0.1:1 - "GET {logged_target} HTTP/1.1" 200'
