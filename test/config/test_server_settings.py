"""SGLang's own settings in a plan, and the record of SGLang's defaults."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from sglang_canopy.config.plan_arguments import arguments_of_plan
from sglang_canopy.config.plan_file import ServerPlan, read_plan, write_plan
from sglang_canopy.config.server_settings import (
    EXTRA_CONFIG,
    SGLANG_DEFAULTS,
    ServerSettings,
    chunk_of,
)
from sglang_canopy.errors import CanopyError

PLANNED = ServerSettings(
    page_size=64,
    max_total_tokens=4096,
    enable_hierarchical_cache=True,
    hicache_storage_backend="canopy",
    hicache_storage_prefetch_policy="wait_complete",
    prefetch_threshold=512,
)


def written(tmp_path, **said):
    path = tmp_path / "plan.json"
    write_plan(path, ServerPlan(**said))
    return str(path)


def test_defaults_are_those_of_sglangs_server_args() -> None:
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    theirs = {f.name: f.default for f in record_fields(ServerArgs)}
    known = SGLANG_DEFAULTS.to_json()
    for name, value in known.items():
        if theirs.get(name) is not None:
            assert theirs[name] == value, name
    # The tests below check settings that SGLang computes or stores elsewhere.
    left = {name for name in known if theirs.get(name) is None}
    assert left == {
        "page_size", "chunked_prefill_size", "max_running_requests",
        "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(ServerSettings)} - set(theirs) == {
        "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    }  # fmt: skip


def test_defaults_that_sglang_works_out() -> None:
    from sglang.srt.arg_groups.overrides import _page_size_default
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    assert _page_size_default(SimpleNamespace(page_size=None)) == {
        "page_size": SGLANG_DEFAULTS.page_size
    }
    _, threshold, base, per_ki, _ = HybridCacheController.parse_storage_backend_extra_config(None)
    assert threshold == SGLANG_DEFAULTS.prefetch_threshold
    assert base == SGLANG_DEFAULTS.prefetch_timeout_base
    assert per_ki == SGLANG_DEFAULTS.prefetch_timeout_per_ki_token


@pytest.mark.parametrize("gib", [16, 24, 40, 80, 141, 192])
def test_chunks_grow_with_the_memory_as_in_sglang(monkeypatch, gib) -> None:
    from sglang.srt.arg_groups import memory_hook

    said = {}

    class Enough(Exception):
        pass

    def declare(_args, _who, **fields):
        said.update(fields)
        raise Enough

    graphs = SimpleNamespace(decode=SimpleNamespace(max_bs=1), prefill=SimpleNamespace(max_bs=1))
    view = SimpleNamespace(
        device="cuda", cuda_graph_config=graphs, chunked_prefill_size=None, tp_size=1
    )
    monkeypatch.setattr(memory_hook, "resolving_view", lambda args: view)
    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda device: gib * 1024)
    monkeypatch.setattr(memory_hook, "declare_resolution", declare)
    with pytest.raises(Enough):
        memory_hook.handle_gpu_memory_settings(None)
    assert said == {"chunked_prefill_size": chunk_of(gib)}


def test_settings_survive_a_round_trip(tmp_path) -> None:
    assert read_plan(written(tmp_path, server=PLANNED)).server == PLANNED
    assert ServerSettings(page_size=1).over(PLANNED) == dataclasses.replace(PLANNED, page_size=1)


def test_a_plan_sets_sglangs_arguments(tmp_path) -> None:
    path = written(tmp_path, server=PLANNED, radix_eviction="wa")
    added, overruled = arguments_of_plan(path, ["--model-path", "m"])
    assert overruled == []
    given = dict(zip(added, [*added[1:], ""]))
    assert given["--page-size"] == "64"
    assert given["--max-total-tokens"] == "4096"
    assert "--enable-hierarchical-cache" in added
    assert given["--hicache-storage-backend"] == "canopy"
    assert given["--hicache-storage-prefetch-policy"] == "wait_complete"
    assert json.loads(given[EXTRA_CONFIG]) == {"prefetch_threshold": 512}


def test_typed_settings_win_and_extra_configurations_are_merged(tmp_path) -> None:
    path = written(tmp_path, server=PLANNED)
    typed = ["--page-size", "16", "--enable-hicache", EXTRA_CONFIG, '{"path": "/kv"}']
    added, overruled = arguments_of_plan(path, typed)
    assert "--page-size" not in added
    assert "--enable-hierarchical-cache" not in added
    assert any("--page-size 64" in line for line in overruled)
    joined = json.loads(added[added.index(EXTRA_CONFIG) + 1])
    assert joined == {"prefetch_threshold": 512, "path": "/kv"}


def test_a_server_lends_its_share_of_a_shared_store(tmp_path) -> None:
    server = ServerSettings(hicache_storage_backend="mooncake")
    path = written(tmp_path, server=server, disk_bytes=1 << 30)
    where = '{"master_server_address": "127.0.0.1:50051"}'
    added, overruled = arguments_of_plan(path, [EXTRA_CONFIG, where])
    assert overruled == []
    joined = json.loads(added[added.index(EXTRA_CONFIG) + 1])
    assert joined == {
        "global_segment_size": 1 << 30, "master_server_address": "127.0.0.1:50051"
    }  # fmt: skip
    _, overruled = arguments_of_plan(path, [])
    assert any("say where the store is" in line for line in overruled)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"page_size": 0}, "page_size must be a whole number above 0, got 0"),
        ({"hicache_write_policy": "never"}, "must be one of write_through, "),
        ({"mem_fraction_static": 1.5}, "must be a number between 0 and 1"),
        ({"enable_hierarchical_cache": 1}, "must be true or false"),
        ({"schedule_conservativeness": "x"}, "must be a number 0 or more"),
    ],
)
def test_a_wrong_setting_is_named(fields, message) -> None:
    with pytest.raises(CanopyError, match=message):
        ServerSettings(**fields)
    with pytest.raises(CanopyError, match="unknown setting 'pages'"):
        ServerSettings.from_json({"pages": 1})
