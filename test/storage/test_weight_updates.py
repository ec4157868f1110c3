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

PATH_TOKENS = [100 + i for i in range(8)]


@pytest.fixture(autouse=True)
def fresh_weights(monkeypatch: pytest.MonkeyPatch) -> Weights:
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
    """A tree with a disk tier, and SGLang's manager of weight updates around it. It is also the runner of
    the model, which loads nothing and reports success."""

    def __init__(self, folder: Path) -> None:
        self.tree = DiskTree(folder)
        self.is_idle, self.succeeds = True, True
        runner, no_op = SimpleNamespace(weight_updater=self), lambda: None
        worker = SimpleNamespace(
            weight_update_runners=lambda: [("target", runner)],
            model_runner=runner,
            deserialize_own_rank=lambda tensors: tensors,
        )
        self.scheduler = SimpleNamespace(
            is_fully_idle=lambda **_: self.is_idle,
            _engine_paused=False,
            tree_cache=self.tree.cache,
            req_to_token_pool=SimpleNamespace(clear=no_op, reset_aux_cache_allocator=no_op),
            token_to_kv_pool_allocator=self.tree.allocator,
            grammar_manager=SimpleNamespace(clear=no_op),
            metrics_reporter=SimpleNamespace(reset_metrics=no_op, is_stats_logging_rank=False),
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
                is_fully_idle=lambda **_: self.is_idle,
                scheduler=self.scheduler,
            )

    def flush(self, empty_cache: bool = False) -> bool:
        return Scheduler.flush_cache(self.scheduler, empty_cache=False)

    def _report_load(self, *_: Any, **__: Any) -> tuple[bool, str]:
        return self.succeeds, "" if self.succeeds else "failed"

    update_weights_from_disk = update_weights_from_tensor = update_weights_from_ipc = _report_load
    load_weights_from_distributed = _report_load

    def receive_weights_from_distributed(self, **_: Any) -> list:
        return []

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self, run_post_load: bool) -> None: ...

    def update(self, source: str, flushes_cache: bool = True) -> bool:
        """Update the weights in the session that SGLang requires; return whether that succeeded."""
        if source == "disk":
            update = UpdateWeightFromDiskReqInput(model_path="elsewhere", flush_cache=flushes_cache)
            return self.manager.update_weights_from_disk(update).success
        if source == "ipc":
            update = UpdateWeightsFromIPCReqInput(zmq_handles={}, flush_cache=flushes_cache)
            return self.manager.update_weights_from_ipc(update).success
        assert self.manager.begin_weight_update(BeginWeightUpdateReqInput()).success
        if source == "distributed":
            fields = {"names": [], "dtypes": [], "shapes": [], "flush_cache": flushes_cache}
            update = UpdateWeightsFromDistributedReqInput(**fields)
            succeeded = self.manager.update_weights_from_distributed(update).success
        elif source == "tensor":
            fields = {"serialized_named_tensors": [], "flush_cache": flushes_cache}
            update = UpdateWeightsFromTensorReqInput(**fields)
            succeeded = self.manager.update_weights_from_tensor(update).success
        else:
            assert source == "peer"
            succeeded = True
        assert self.manager.end_weight_update(EndWeightUpdateReqInput()).success
        return succeeded

    def disk_tokens(self) -> int:
        """Return the tokens of the path that a lookup finds on disk."""
        return 2 * self.tree.storage.batch_exists(self.tree.keys(PATH_TOKENS))

    def unavailable_reason(self) -> str | None:
        return self.tree.storage.status()["unavailable"]


@pytest.fixture
def server(tmp_path: Path):
    new_server = Server(tmp_path / "disk")
    new_server.tree.serve(PATH_TOKENS, 1.0)
    assert new_server.disk_tokens() == 8
    yield new_server
    new_server.tree.close()


@pytest.mark.parametrize("source", ["disk", "ipc", "distributed", "tensor"])
def test_after_an_update_no_earlier_kv_is_found(server: Server, source: str) -> None:
    assert server.update(source)
    assert server.disk_tokens() == 0
    server.tree.storage.maintain()
    assert server.unavailable_reason() is None
    assert server.disk_tokens() == 0
    assert server.tree.serve(PATH_TOKENS, 2.0) == 0  # neither the tree nor the host has anything
    assert server.disk_tokens() == 8


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_peers_weights_and_failed_updates_empty_the_tier(server: Server, succeeds: bool) -> None:
    server.succeeds = succeeds
    assert server.update("peer" if succeeds else "disk") == succeeds
    assert server.disk_tokens() == 0
    assert not succeeds or "POST /flush_cache" in server.unavailable_reason()
    assert server.flush()
    server.tree.storage.maintain()
    assert (server.unavailable_reason(), server.disk_tokens()) == (None, 0)


@pytest.mark.parametrize("source", ["disk", "tensor"])
def test_kv_in_memory_after_an_update_is_not_written_to_disk(server: Server, source: str) -> None:
    """``flush_cache: false`` keeps the KV of the earlier weights in use, as the request says."""
    assert server.update(source, flushes_cache=False)
    server.tree.storage.maintain()
    server.tree.insert([*PATH_TOKENS, 200, 201], server.tree.request(2.0))
    assert server.disk_tokens() == 0
    assert "POST /flush_cache" in server.unavailable_reason()
    assert server.flush()
    server.tree.storage.maintain()
    assert (server.unavailable_reason(), server.disk_tokens()) == (None, 0)


def test_a_refused_flush_keeps_the_disk_tier_unavailable(server: Server) -> None:
    server.is_idle = False
    assert not server.update("disk")
    server.tree.storage.maintain()
    assert "POST /flush_cache" in server.unavailable_reason()
    server.is_idle = True
    assert server.flush()
    server.tree.storage.maintain()
    assert server.unavailable_reason() is None


def test_a_flush_within_an_update_session_does_not_end_it(server: Server) -> None:
    assert server.manager.begin_weight_update(BeginWeightUpdateReqInput()).success
    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], flush_cache=True)
    assert server.manager.update_weights_from_tensor(request).success
    server.tree.storage.maintain()
    assert "session" in server.unavailable_reason()
    assert server.manager.update_weights_from_tensor(request).success
    assert server.manager.end_weight_update(EndWeightUpdateReqInput()).success
    server.tree.storage.maintain()
    assert server.unavailable_reason() is None


def test_a_flush_without_an_update_keeps_the_pages(server: Server) -> None:
    assert server.flush()
    assert server.disk_tokens() == 8


def test_updates_leave_no_folders_and_no_pages_behind(server: Server) -> None:
    disk_folder = server.tree.store.path.parent
    folders_before = set(disk_folder.iterdir())
    for time_s in range(2, 6):
        assert server.update("tensor")
        server.tree.storage.maintain()
        server.tree.serve(PATH_TOKENS, float(time_s))
    assert len(set(disk_folder.iterdir()) - folders_before) == 1  # of the current weights
    assert len(list(disk_folder.rglob("segment-*"))) == 1
    assert server.tree.store.counters.written_pages == 20  # of all updates together


def test_no_later_start_finds_pages_of_updated_weights(tmp_path, monkeypatch):
    for _ in range(2):
        monkeypatch.setattr(weights, "WEIGHTS", Weights())
        server = Server(tmp_path / "disk")
        assert server.disk_tokens() == 0
        assert server.update("disk")
        server.tree.storage.maintain()
        assert server.disk_tokens() == 0
        server.tree.serve(PATH_TOKENS, 1.0)
        assert server.disk_tokens() == 8
        server.tree.close()
    monkeypatch.setattr(weights, "WEIGHTS", Weights())
    server = Server(tmp_path / "disk")
    assert len(list(server.tree.store.path.parent.glob("*/namespace"))) == 1  # the rest is gone
    server.tree.close()
