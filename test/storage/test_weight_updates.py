"""The disk tier across updates of the weights, through SGLang's own update and flush calls."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel

from sglang_canopy.server.start import plugin
from sglang_canopy.storage import weights
from sglang_canopy.storage.weights import Weights
from support.disk_tree import DiskTree

PATH = [100 + i for i in range(8)]


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> Weights:
    """SGLang with Canopy's hooks, and a process whose weights were never updated."""
    plugin.load()
    HookRegistry.apply_hooks()
    new_weights = Weights()
    monkeypatch.setattr(weights, "WEIGHTS", new_weights)
    return new_weights


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory):
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Server:
    """A tree with a disk tier, and SGLang's manager of weight updates around it.

    A runner loads weights and only reports success.
    """

    def __init__(self, folder: Path) -> None:
        self.tree = DiskTree(folder)
        self.idle, self.succeeds = True, True
        runner = SimpleNamespace(weight_updater=self)
        worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)],
            model_runner=runner,
            deserialize_own_rank=lambda tensors: tensors,
        )
        self.scheduler = SimpleNamespace(
            is_fully_idle=lambda **_: self.idle,
            _engine_paused=False,
            tree_cache=self.tree.cache,
            req_to_token_pool=SimpleNamespace(
                clear=lambda: None, reset_aux_cache_allocator=lambda: None
            ),
            token_to_kv_pool_allocator=self.tree.allocator,
            grammar_manager=SimpleNamespace(clear=lambda: None),
            metrics_reporter=SimpleNamespace(
                reset_metrics=lambda: None, is_stats_logging_rank=False
            ),
            draft_worker=None,
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[]),
            record_weight_version_change=lambda new_version: None,
            server_args=SimpleNamespace(),
        )
        with get_parallel().override(tp_group=SimpleNamespace(cpu_group=None)):
            self.manager = SchedulerWeightUpdaterManager(
                tp_worker=worker,
                draft_worker=None,
                memory_saver_adapter=None,
                flush_cache=self.flush,
                is_fully_idle=lambda **_: self.idle,
                scheduler=self.scheduler,
            )

    def flush(self, empty_cache: bool = False) -> bool:
        return Scheduler.flush_cache(self.scheduler, empty_cache=False)

    # ---- the runner's side ----

    def _load(self, *_: Any, **__: Any) -> tuple[bool, str]:
        return self.succeeds, "" if self.succeeds else "failed"

    update_weights_from_disk = update_weights_from_tensor = update_weights_from_ipc = _load
    load_weights_from_distributed = _load

    def receive_weights_from_distributed(self, **_: Any) -> list:
        return []

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self, run_post_load: bool) -> None: ...

    # ---- actions of a test ----

    def update(self, source: str, flush: bool = True) -> bool:
        """One update in the session that SGLang requires."""
        if source == "disk":
            update = UpdateWeightFromDiskReqInput(model_path="elsewhere", flush_cache=flush)
            return self.manager.update_weights_from_disk(update).success
        if source == "ipc":
            update = UpdateWeightsFromIPCReqInput(zmq_handles={}, flush_cache=flush)
            return self.manager.update_weights_from_ipc(update).success
        assert self.manager.begin_weight_update(BeginWeightUpdateReqInput()).success
        if source == "distributed":
            update = UpdateWeightsFromDistributedReqInput(
                names=[], dtypes=[], shapes=[], flush_cache=flush
            )
            success = self.manager.update_weights_from_distributed(update).success
        elif source == "tensor":
            update = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], flush_cache=flush)
            success = self.manager.update_weights_from_tensor(update).success
        else:
            assert source == "peer"
            success = True
        assert self.manager.end_weight_update(EndWeightUpdateReqInput()).success
        return success

    def on_disk(self) -> int:
        """Tokens of the path that a lookup finds on disk."""
        return 2 * self.tree.storage.batch_exists(self.tree.keys(PATH))

    def status(self) -> str | None:
        return self.tree.storage.status()["unavailable"]


@pytest.fixture
def server(tmp_path: Path):
    new_server = Server(tmp_path / "disk")
    new_server.tree.serve(PATH, 1.0)
    assert new_server.on_disk() == 8
    yield new_server
    new_server.tree.close()


@pytest.mark.parametrize("source", ["disk", "ipc", "distributed", "tensor"])
def test_after_an_update_no_earlier_kv_is_found(server: Server, source: str) -> None:
    assert server.update(source)
    assert server.on_disk() == 0
    server.tree.storage.maintain()
    assert server.status() is None
    assert server.on_disk() == 0
    assert server.tree.serve(PATH, 2.0) == 0  # neither the tree nor the host has anything
    assert server.on_disk() == 8


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_peers_weights_and_failed_updates_empty_the_tier(server: Server, succeeds: bool) -> None:
    server.succeeds = succeeds
    assert server.update("peer" if succeeds else "disk") == succeeds
    assert server.on_disk() == 0
    assert not succeeds or "POST /flush_cache" in server.status()
    assert server.flush()
    server.tree.storage.maintain()
    assert (server.status(), server.on_disk()) == (None, 0)


@pytest.mark.parametrize("source", ["disk", "tensor"])
def test_kv_in_memory_after_an_update_is_not_written_to_disk(server: Server, source: str) -> None:
    """``flush_cache: false`` keeps the old KV in use, as its user requested."""
    assert server.update(source, flush=False)
    server.tree.storage.maintain()
    server.tree.insert([*PATH, 200, 201], server.tree.request(2.0))
    assert server.on_disk() == 0
    assert "POST /flush_cache" in server.status()
    assert server.flush()
    server.tree.storage.maintain()
    assert (server.status(), server.on_disk()) == (None, 0)


def test_a_refused_flush_keeps_the_disk_tier_unavailable(server: Server) -> None:
    server.idle = False
    assert not server.update("disk")
    server.tree.storage.maintain()
    assert "POST /flush_cache" in server.status()
    server.idle = True
    assert server.flush()
    server.tree.storage.maintain()
    assert server.status() is None


def test_a_flush_within_an_update_session_does_not_end_it(server: Server) -> None:
    assert server.manager.begin_weight_update(BeginWeightUpdateReqInput()).success
    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], flush_cache=True)
    assert server.manager.update_weights_from_tensor(request).success
    server.tree.storage.maintain()
    assert "session" in server.status()
    assert server.manager.update_weights_from_tensor(request).success
    assert server.manager.end_weight_update(EndWeightUpdateReqInput()).success
    server.tree.storage.maintain()
    assert server.status() is None


def test_a_flush_without_an_update_keeps_the_pages(server: Server) -> None:
    assert server.flush()
    assert server.on_disk() == 8


def test_updates_leave_no_folders_and_no_pages_behind(server: Server) -> None:
    top = server.tree.store.path.parent
    old_folders = set(top.iterdir())
    for time in range(2, 6):
        assert server.update("tensor")
        server.tree.storage.maintain()
        server.tree.serve(PATH, float(time))
    assert len(set(top.iterdir()) - old_folders) == 1  # of the current weights
    assert len(list(top.rglob("segment-*"))) == 1
    assert server.tree.store.counters.written_pages == 20  # of all updates together


def test_no_later_start_finds_pages_of_updated_weights(tmp_path, monkeypatch):
    for _ in range(2):
        monkeypatch.setattr(weights, "WEIGHTS", Weights())
        server = Server(tmp_path / "disk")
        assert server.on_disk() == 0
        assert server.update("disk")
        server.tree.storage.maintain()
        assert server.on_disk() == 0
        server.tree.serve(PATH, 1.0)
        assert server.on_disk() == 8
        server.tree.close()
    monkeypatch.setattr(weights, "WEIGHTS", Weights())
    server = Server(tmp_path / "disk")
    assert len(list(server.tree.store.path.parent.glob("*/namespace"))) == 1  # the rest is gone
    server.tree.close()
