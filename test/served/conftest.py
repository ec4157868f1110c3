"""Real servers over HTTP, started for a test and stopped after it.

`launch(...)` is a context manager for a server of the test's own. `shared_server(...)` keeps one
for all tests of a process: the same arguments give the same server again."""

import contextlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from launch_server import ServerProcess, add_plugin, cpu_arguments, free_port, serving
from support import forked
from support.document_client import REUSE_FLAG
from support.served_routes import HttpAnswer

READY_TIMEOUT_S = 600.0
TEST_TIMEOUT_S = 1500  # some tests start two servers, on a machine that may be busy
ANSWER_TIMEOUT_S = 120.0
USER_KEY, ADMIN_KEY = "user-s3cr3t-41c7", "admin-s3cr3t-90be"
Serve = Callable[..., AbstractContextManager["Client"]]


@dataclass(slots=True, frozen=True)
class Client:
    """A client for tests. It sends token ids, so that lengths are exact."""

    server: ServerProcess

    @property
    def url(self) -> str:
        return self.server.url

    def send(self, path: str, body: Any = None, method=None, **headers: str) -> HttpAnswer:
        """Return any answer. Header names have underscores. If the server has a user's key, it is sent unless
        ``headers`` has an ``Authorization``."""
        sent_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        sent_headers = self.key_header("--api-key") | sent_headers
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **sent_headers},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
                return HttpAnswer(answer.status, answer.read().decode())
        except urllib.error.HTTPError as error:
            return HttpAnswer(error.code, error.read().decode())

    def key_header(self, flag: str) -> dict[str, str]:
        """Return the header with the key of the server's ``flag``, if it has one."""
        flags = self.server.process.args
        return {"Authorization": f"Bearer {flags[flags.index(flag) + 1]}"} if flag in flags else {}

    def post(self, path: str, body: Any = None) -> Any:
        code, text = self.send(path, body or {})
        assert code == 200, text
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path: str) -> str:
        code, text = self.send(path)
        assert code == 200, text
        return text

    def status(self) -> dict[str, Any]:
        return json.loads(self.get("/canopy/status"))

    def rank(self) -> dict[str, Any]:
        """Return the status of the server's only replica."""
        (status,) = self.status()["ranks"]
        return status

    def requests_by_category(self) -> dict[str, int]:
        return {row["category"]: row["requests"] for row in self.rank()["categories"]}

    def generate(
        self,
        token_ids: list[int],
        output_tokens: int = 1,
        custom_params: dict[str, Any] | None = None,
        **body: Any,
    ) -> dict[str, Any]:
        """Generate exactly `output_tokens`, greedily; return `text`, `output_ids` and `meta_info`."""
        sampling_params: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        sampling_params["max_new_tokens"] = output_tokens
        if custom_params is not None:
            sampling_params["custom_params"] = custom_params
        body |= {"input_ids": token_ids, "sampling_params": sampling_params}
        return self.post("/generate", body)

    def cached(self, token_ids: list[int], output_tokens: int = 1, **body: Any) -> dict[str, int]:
        """Generate; return the cached prompt tokens by tier."""
        meta_info = self.generate(token_ids, output_tokens, **body)["meta_info"]
        details = meta_info.get("cached_tokens_details") or {}
        tiers = {"device": 0, "host": 0, "storage": 0, **details}
        return {"total": meta_info["cached_tokens"], **tiers}

    def flush(self) -> None:
        """Flush once nothing runs: an answer may come before the scheduler has ended its last step."""
        header = self.key_header("--admin-api-key")
        assert self.send("/flush_cache?timeout=20", {}, **header)[0] == 200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


def serve(model: Path, log: Path, *arguments: str, kv_tokens: int, **options: Any) -> Any:
    """Return the context manager of a server; a model without weights gets random ones. A server
    is killed at the end, since SGLang's own shutdown takes seven seconds."""
    port = free_port()
    flags = [*cpu_arguments(model, kv_tokens=kv_tokens, dtype="float32"), *arguments]
    if options.pop("overlap", False):  # SGLang's default schedule, which no other server here needs
        flags.remove("--disable-overlap-schedule")
    if not (model / "model.safetensors").exists():
        flags += ["--load-format", "dummy"]
    return serving(
        flags, log=log, port=port, deadline_s=READY_TIMEOUT_S, patience_s=0.0,
        **{"start": forked.serve, **options},
    )  # fmt: skip


def processes_of(server: ServerProcess) -> list[int]:
    """Return the ids of the live processes of the server's group."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == server.process.pid:
                pids.append(process.pid)
    return pids


@pytest.fixture
def launch(tmp_path: Path) -> Serve:
    """`with launch(model, "--flag", ..., kv_tokens=4096, environment={...}) as client:`"""

    @contextlib.contextmanager
    def start(model, *arguments: str, kv_tokens: int = 4096, **options: Any) -> Iterator[Client]:
        log = tmp_path / f"server-{len(list(tmp_path.glob('server-*.log')))}.log"
        with serve(model, log, *arguments, kv_tokens=kv_tokens, **options) as process:
            assert len(processes_of(process)) >= 3  # HTTP, scheduler, detokenizer
            yield Client(process)
        assert processes_of(process) == []

    return start


class SharedServer(NamedTuple):
    client: Client
    exit_stack: contextlib.ExitStack


@pytest.fixture(scope="session")
def shared_servers() -> Iterator[dict[tuple[Any, ...], SharedServer]]:
    """The shared servers of this process by their arguments."""
    servers: dict[tuple[Any, ...], SharedServer] = {}
    yield servers
    for shared in servers.values():
        shared.exit_stack.close()


@pytest.fixture(scope="module")
def shared_server(shared_servers, tmp_path_factory):
    """`client = shared_server(model, "--flag", ...)`, flushed. The next module with the same
    arguments gets it too, unless another server starts in between."""
    requested_keys = set()

    def start(model: Path, *arguments: str, kv_tokens: int = 4096, **options: Any) -> Client:
        key = (model, arguments, kv_tokens, repr(sorted(options.items())))
        requested_keys.add(key)
        if key not in shared_servers:
            for stale_key in shared_servers.keys() - requested_keys:
                shared_servers.pop(stale_key).exit_stack.close()
            log = tmp_path_factory.mktemp("server") / "server.log"
            stack = contextlib.ExitStack()
            serving_context = serve(model, log, *arguments, kv_tokens=kv_tokens, **options)
            shared_servers[key] = SharedServer(Client(stack.enter_context(serving_context)), stack)
        client = shared_servers[key].client
        client.flush()
        return client

    return start


@pytest.fixture
def plain_sglang(
    shared_server: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Client]:
    """`client = plain_sglang(model, "--flag", ...)`: SGLang without Canopy, on the CPU's kernels alone."""
    add_plugin(tmp_path, "plain", "canopy_cpu:install")

    def start(model: Path, *arguments: str, **options: Any) -> Client:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)  # a server finds its plugins from its folder
            environment = {"SGLANG_PLUGINS": "plain"}
            return shared_server(model, *arguments, environment=environment, **options)

    return start


@pytest.fixture(scope="session")
def request_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which `canopy_server` logs its requests."""
    return tmp_path_factory.mktemp("request-log")


@pytest.fixture
def canopy_server(shared_server, small_model, request_log):
    """The server of the group `canopy`: one start for every test that its flags leave alone."""
    flags = ["--radix-eviction", "wa", "--canopy-enable-forced-output"]
    flags += ["--enable-custom-logit-processor", "--log-requests", "--log-requests-level", "3"]
    flags += ["--log-requests-format", "json", "--log-requests-target", str(request_log)]
    return shared_server(small_model, *flags, kv_tokens=2048)


@pytest.fixture
def metrics_server(shared_server, small_model, tmp_path_factory):
    """The server of the group `metrics`: keys, and three small tiers with TTLs on the disk."""
    folder = tmp_path_factory.getbasetemp() / "metrics-plan"
    folder.mkdir(exist_ok=True)
    ttl = {"residual_ttl_s": 3600, "categories": {"rag": 60}}
    disk = {"capacity_bytes": 64 << 20, "path": str(folder / "disk")}
    flags = ("--radix-eviction", "auto", "--enable-metrics", "--page-size", "16")
    flags += ("--enable-hierarchical-cache", "--hicache-storage-backend", "canopy")
    flags += ("--hicache-storage-prefetch-policy", "wait_complete", "--canopy-host-gb")
    flags += (f"{4096 * 1024 / 1e9}", "--canopy-ttl", json.dumps(ttl))
    flags += ("--hicache-storage-backend-extra-config", json.dumps(disk))
    flags += ("--served-model-name", "m", "--api-key", USER_KEY, "--admin-api-key", ADMIN_KEY)
    return shared_server(small_model, *flags, kv_tokens=2048)


@pytest.fixture
def documents_server(shared_server: Callable[..., Client], small_model: Path) -> Client:
    """The server of the group `documents`."""
    queue_flags = ("--canopy-session-gate", "auto", "--canopy-queue-order", "bounded-shortest")
    flags = (*REUSE_FLAG, "--radix-eviction", "wa", *queue_flags)
    return shared_server(small_model, *flags, kv_tokens=8192)


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Client:
    """The server of the test's group."""
    group = request.node.get_closest_marker("xdist_group").args[0]
    return request.getfixturevalue(f"{group}_server")
