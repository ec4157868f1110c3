"""SGLang's own settings in a plan, and the record of SGLang's defaults."""

import dataclasses
from types import SimpleNamespace

import pytest

from sglang_canopy.config.server_settings import (
    SGLANG_DEFAULTS,
    ServerSettings,
    default_chunk_tokens,
)
from sglang_canopy.errors import CanopyError

PLANNED_SETTINGS = ServerSettings(
    page_size=64,
    max_total_tokens=4096,
    enable_hierarchical_cache=True,
    hicache_storage_backend="canopy",
    hicache_storage_prefetch_policy="wait_complete",
    prefetch_threshold=512,
)


def test_defaults_are_those_of_sglangs_server_args() -> None:
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.server_args import ServerArgs

    sglang_defaults = {field.name: field.default for field in record_fields(ServerArgs)}
    canopy_defaults = SGLANG_DEFAULTS.to_json()
    for name, value in canopy_defaults.items():
        if sglang_defaults.get(name) is not None:
            assert sglang_defaults[name] == value, name
    # The tests below check settings that SGLang computes or stores elsewhere.
    unchecked = {name for name in canopy_defaults if sglang_defaults.get(name) is None}
    assert unchecked == {
        "page_size", "chunked_prefill_size", "max_running_requests",
        "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(ServerSettings)} - set(sglang_defaults) == {
        "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    }  # fmt: skip


def test_defaults_that_sglang_computes_are_equal() -> None:
    from sglang.srt.arg_groups.overrides import _page_size_default
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    no_page_size = SimpleNamespace(page_size=None)
    assert _page_size_default(no_page_size) == {"page_size": SGLANG_DEFAULTS.page_size}
    _, threshold, base_s, per_ki, _ = HybridCacheController.parse_storage_backend_extra_config(None)
    assert threshold == SGLANG_DEFAULTS.prefetch_threshold
    assert base_s == SGLANG_DEFAULTS.prefetch_timeout_base
    assert per_ki == SGLANG_DEFAULTS.prefetch_timeout_per_ki_token


@pytest.mark.parametrize("memory_gib", [16, 24, 40, 80, 141, 192])
def test_chunks_grow_with_the_memory_as_in_sglang(monkeypatch, memory_gib) -> None:
    from sglang.srt.arg_groups import memory_hook

    declared = {}

    class StopHere(Exception):
        pass

    def declare(_args, _source, **fields):
        declared.update(fields)
        raise StopHere

    graphs = SimpleNamespace(decode=SimpleNamespace(max_bs=1), prefill=SimpleNamespace(max_bs=1))
    sizes = {"chunked_prefill_size": None, "tp_size": 1}
    view = SimpleNamespace(device="cuda", cuda_graph_config=graphs, **sizes)
    monkeypatch.setattr(memory_hook, "resolving_view", lambda args: view)
    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda device: memory_gib * 1024)
    monkeypatch.setattr(memory_hook, "declare_resolution", declare)
    with pytest.raises(StopHere):
        memory_hook.handle_gpu_memory_settings(None)
    assert declared == {"chunked_prefill_size": default_chunk_tokens(memory_gib)}


def test_settings_restored_from_their_flags_are_equal() -> None:
    flags = PLANNED_SETTINGS.flags()
    assert flags["page-size"] == 64
    assert flags["enable-hierarchical-cache"] is True
    assert "prefetch-threshold" not in flags
    extra = {"hicache-storage-backend-extra-config": PLANNED_SETTINGS.extra_config()}
    assert ServerSettings.from_flags({**flags, **extra, "canopy-host-gb": 3}) == PLANNED_SETTINGS
    expected = dataclasses.replace(PLANNED_SETTINGS, page_size=1)
    assert ServerSettings(page_size=1).fill_from(PLANNED_SETTINGS) == expected


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
