"""Identity of KV on disk: the model's configuration, weights and adapters."""

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_canopy import SGLANG_VERSION
from sglang_canopy.errors import CanopyError
from sglang_canopy.server.start import plugin
from sglang_canopy.storage import weights
from sglang_canopy.storage.backend import CanopyStorage
from sglang_canopy.storage.namespace import rank_namespace
from sglang_canopy.storage.server_arguments import CHANGES_KV, LEAVES_KV, unreviewed_arguments
from sglang_canopy.storage.weights import adapter_id
from support.store_pool import host_pool, page_hashes, storage_config, token_indices

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "torch_dtype": "float16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return folder


def namespace_of(model: object, **arguments: Any) -> str:
    """Return the namespace of a server with these arguments, on one pool and rank."""
    pool = host_pool(2)
    server_args = ServerArgs(model_path=str(model), device="cpu", page_size=4, **arguments)
    set_global_server_args_for_scheduler(server_args)
    return rank_namespace(storage_config(None), pool)


def rewrite_byte(path: Path, offset: int, byte: bytes) -> None:
    """Change one byte and keep size and modification time."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(byte)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def open_storage(model: Path, disk_folder: Path) -> tuple[Any, CanopyStorage]:
    """Return the pool and the disk tier of a server that starts with ``model``."""
    pool = host_pool(2)
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))
    extra_config = {"path": str(disk_folder), "capacity_bytes": 1 << 20, "sweep_s": 3600}
    storage = CanopyStorage(storage_config(extra_config, model_name=str(model)))
    storage.register_mem_pool_host(pool)
    return pool, storage


def test_the_same_model_downloaded_again_finds_its_pages_after_a_restart(model, tmp_path):
    pool, storage = open_storage(model, tmp_path / "disk")
    storage.batch_set_v1(page_hashes("a", 2), token_indices(pool, [0, 1]))
    storage.close()
    copied_model = tmp_path / "elsewhere" / "the-model"
    shutil.copytree(model, copied_model, copy_function=shutil.copyfile)
    os.utime(copied_model / "model.safetensors", (1, 1))
    _, storage = open_storage(copied_model, tmp_path / "disk")
    assert storage.batch_exists(page_hashes("a", 2)) == 2
    storage.close()


@pytest.mark.parametrize(
    "arguments",
    [
        {"json_model_override_args": '{"rope_theta": 5.0}'},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"quantization": "w8a8_int8"},
        {"revision": "other"},
        {"load_format": "dummy"},
        {"rl_quant_profile": "/profile"},
        {"kt_method": "AMXINT8"},
        {"custom_weight_loader": ["module.load"]},
        {"modelopt_checkpoint_restore_path": "/checkpoint"},
        {"weight_version": "2"},
        {"forward_hooks": [{"name": "scale", "hook_factory": "module.scale"}]},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_an_argument_that_changes_kv_changes_the_namespace(model: Path, arguments: dict) -> None:
    assert namespace_of(model, **arguments) != namespace_of(model)


def test_an_argument_that_leaves_kv_alone_keeps_the_namespace(model: Path) -> None:
    assert namespace_of(model, schedule_policy="fcfs", log_level="warning") == namespace_of(model)


@pytest.mark.skipif(version("sglang") != SGLANG_VERSION, reason="the pinned release's are listed")
def test_every_argument_of_sglang_is_reviewed() -> None:
    names = {field.name for field in record_fields(ServerArgs)}
    assert not unreviewed_arguments(names), "put these into storage/server_arguments.json"
    assert not (LEAVES_KV | CHANGES_KV) - names, "SGLang has none of these"
    assert not LEAVES_KV & CHANGES_KV


def test_an_unreviewed_argument_counts_as_changing_kv(model: Path, monkeypatch) -> None:
    pool, namespace = host_pool(2), namespace_of(model)
    changed = {**get_context().resolved_server_args_dict(), "new": 1}
    monkeypatch.setattr(type(get_context()), "resolved_server_args_dict", lambda _: changed)
    assert rank_namespace(storage_config(None), pool) != namespace


@pytest.mark.parametrize("argument", ["kt_weight_path", "quantization_param_path"])
def test_expert_weights_and_kv_scales_count_by_content(model, tmp_path, argument) -> None:
    (tmp_path / "experts").mkdir()
    file = tmp_path / "experts" / "0.json"
    file.write_text('{"scale": 1.0}')
    arguments = {argument: str(file.parent if argument == "kt_weight_path" else file)}
    namespace = namespace_of(model, **arguments)
    assert namespace != namespace_of(model)
    rewrite_byte(file, 10, b"2")
    assert namespace_of(model, **arguments) != namespace


@pytest.mark.parametrize(
    "arguments",
    [{"load_format": "rdma"}, {"load_format": "remote"}, {"weight_cache_mode": "daemon"}],
    ids=str,
)
def test_weights_not_read_from_files_find_no_pages_of_earlier_starts(model, monkeypatch, arguments):
    extra_config = {"path": str(model.parent / "disk"), "capacity_bytes": 1 << 20, "sweep_s": 3600}
    folders = []
    for _ in range(2):
        monkeypatch.setattr(weights, "WEIGHTS", weights.Weights())
        pool = host_pool(2)
        namespace_of(model, **arguments)
        storage = CanopyStorage(storage_config(extra_config))
        storage.register_mem_pool_host(pool)
        folders.append(storage.store.path)
        assert (storage.store.path / "temporary").exists()
        storage.close()
    assert folders[0] != folders[1]


def test_weights_that_differ_far_into_a_file_change_the_namespace(model: Path) -> None:
    weights_file = model / "model.safetensors"
    os.truncate(weights_file, 20 << 20)
    namespace = namespace_of(model)
    with weights_file.open("r+b") as file:  # one tensor of a file was retrained
        file.seek(9 << 20)
        file.write(b"\x01" * (5 << 20))
    assert namespace_of(model) != namespace


def test_files_that_are_no_part_of_the_model_keep_the_namespace(model: Path) -> None:
    namespace = namespace_of(model)
    (model / "README.md").write_text("new")
    (model / "runs.tfevents").write_text("new")
    assert namespace_of(model) == namespace


def test_a_model_named_by_hub_id_is_identified_by_its_snapshot(tmp_path, monkeypatch) -> None:
    import huggingface_hub.constants

    hub = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    repo = hub / "models--canopy--tiny"
    (repo / "refs").mkdir(parents=True)
    for revision in ("a" * 40, "b" * 40):
        make_model(repo / "snapshots" / revision)
    namespaces = []
    for revision, theta in (("a" * 40, 5.0), ("b" * 40, 6.0)):
        (repo / "refs" / "main").write_text(revision)
        config = repo / "snapshots" / revision / "config.json"
        config.write_text(json.dumps({**MODEL_CONFIG, "rope_theta": theta}))
        namespaces.append(namespace_of("canopy/tiny", download_dir=str(hub)))
    assert namespaces[0] != namespaces[1]


def test_a_model_that_cannot_be_fingerprinted_is_refused_by_name(model: Path) -> None:
    pool = host_pool(2)
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))
    (model / "model.safetensors").unlink()
    with pytest.raises(CanopyError, match=r"pages of model .*no weights.*--model-path"):
        rank_namespace(storage_config(None), pool)
    shutil.rmtree(model)
    with pytest.raises(CanopyError, match=r"pages of model .*neither a path nor a hub snapshot"):
        rank_namespace(storage_config(None), pool)


def test_an_adapter_is_identified_by_its_content(tmp_path: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    plugin.load()
    HookRegistry.apply_hooks()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    weights_file = adapter / "adapter_model.safetensors"
    weights_file.write_bytes(bytes(1 << 20))
    first_id = LoRARef.deterministic_id("law", str(adapter))
    assert LoRARef.deterministic_id("law", str(adapter)) == first_id
    assert LoRARef.deterministic_id("tax", str(adapter)) != first_id
    rewrite_byte(weights_file, 777_777, b"\x01")
    assert LoRARef.deterministic_id("law", str(adapter)) != first_id


def test_an_adapters_id_does_not_depend_on_times_that_differ_by_machine(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    ids = []
    for mtime_s in (1, 2):
        os.utime(tmp_path / "adapter_model.safetensors", (mtime_s, mtime_s))
        ids.append(adapter_id(lambda name, path: f"{name}{path}", "law", str(tmp_path)))
    assert ids[0] == ids[1]


def test_an_adapter_named_by_hub_id_counts_with_the_model(model, tmp_path, monkeypatch) -> None:
    """Its id has only its name, so that the ranks of all machines agree on the id."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub = tmp_path / "hub"
    snapshot = hub / "models--canopy--law" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("c" * 40)
    weights_file = snapshot / "adapter_model.safetensors"
    weights_file.write_bytes(b"one")
    (snapshot / "adapter_config.json").write_text("{}")
    assert adapter_id(lambda name, path: "id", "law", "canopy/law") == "id"
    adapters = [LoRARef(lora_id="id", lora_name="law", lora_path="canopy/law", pinned=False)]
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    namespace = namespace_of(model, enable_lora=True, lora_paths=adapters)
    rewrite_byte(weights_file, 0, b"t")
    assert namespace_of(model, enable_lora=True, lora_paths=adapters) != namespace
    absent_adapters = [LoRARef(lora_id="id", lora_name="tax", lora_path="canopy/tax", pinned=False)]
    with pytest.raises(CanopyError, match="adapter 'tax'"):
        namespace_of(model, enable_lora=True, lora_paths=absent_adapters)


def test_page_size_heads_and_ranks_are_part_of_the_namespace(model: Path) -> None:
    pools = [host_pool(2), host_pool(2, page_tokens=64), host_pool(2, head_count=4)]
    pools.append(host_pool(2, "layer_first"))
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu"))
    namespaces = {rank_namespace(storage_config(None), pool) for pool in pools}
    namespaces |= {
        rank_namespace(storage_config(None, **rank), pools[0])
        for rank in ({"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"pp_size": 2})
    }
    for replica in (0, 1):  # the first is what no replica is
        with get_parallel().override(dp_rank=replica):
            namespaces.add(rank_namespace(storage_config(None), pools[0]))
    assert len(namespaces) == 8


def test_files_that_change_under_a_running_server_keep_its_namespace(model: Path) -> None:
    """The store computes its namespace once: files that change later are not the loaded weights."""
    pool, storage = open_storage(model, model.parent / "disk")
    namespace = storage.current.namespace
    rewrite_byte(model / "model.safetensors", 0, b"\xff")
    storage.maintain()
    assert storage.current.namespace == namespace
    assert rank_namespace(storage_config(None), pool) != namespace
    storage.close()
