"""Namespace of a disk store: a text of all facts that must be equal for pages to hold the same KV.

It contains every server argument except those that cannot change KV (``server_arguments``), the
model's configuration as SGLang uses it, a digest of its files, the adapters named at start, the
layout of the pool, and the rank. Files count by content, not by path or time. A model or adapter whose
files are not found is refused, because its pages could be confused with another's. Weights that are not
local (``are_weights_local``) get a new namespace at each start.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args

from sglang_canopy import releases
from sglang_canopy.disk.folder import RANK_SEPARATOR
from sglang_canopy.errors import CanopyError
from sglang_canopy.storage.fingerprint import (
    FilesNotFound,
    find_local_files,
    full_digest,
    model_digest,
    path_digest,
)
from sglang_canopy.storage.server_arguments import LEAVES_KV
from sglang_canopy.storage.weights import adapter_id

_BACKEND = "--hicache-storage-backend canopy"
_FILE_ARGUMENT_SUFFIXES = ("_path", "_file", "_profile")
"""Suffixes of arguments that name files, whose content is included."""
_REMOTE_LOAD_FORMATS = ("remote", "remote_instance", "rdma", "ipc_cache", "private")
"""Load formats with weights from another process or machine."""
_IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "_commit_hash")


def rank_namespace(config: HiCacheStorageConfig, pool: Any) -> str:
    """Return the namespace of one rank's pages, for the initial weights (updates: ``weights.py``).
    Raises ``CanopyError`` if the model or an adapter cannot be identified."""
    fields = {
        "model": _model_digest(),
        "adapters": _adapters_digest(),
        "pool": type(pool).__name__,
        "tag": getattr(pool, "storage_format_tag", None),
        "dtype": str(pool.dtype),
        "layout": pool.layout,
        "page_tokens": pool.page_size,
        "heads": [getattr(pool, name, None) for name in ("head_num", "head_dim", "v_head_dim")],
    }
    rank = {
        "layers": [getattr(pool, name, None) for name in ("start_layer", "end_layer", "layer_num")],
        "tp": [config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dp": [_replica_number(), config.dp_rank],
        "dcp": [*releases.decode_context_position(config)],
    }
    return RANK_SEPARATOR.join(
        "|".join(f"{name}={value}" for name, value in part.items()) for part in (fields, rank)
    )


def _replica_number() -> int:
    """Return the replica's number under ``--dp-size``, which the storage's configuration lacks."""
    try:
        return get_parallel().dp_rank or 0
    except (RuntimeError, ValueError):  # no server around it (tests, benchmarks)
        return 0


def _model_digest() -> str:
    """Return a digest of the effective configuration and of the weights' files."""
    try:
        server = get_server_args()
    except ValueError:  # no server around it (tests, benchmarks)
        return "none"
    arguments = get_context().resolved_server_args_dict()
    name = str(arguments["model_path"])
    if name.lower() in ("none", "dummy"):  # SGLang's names for "no model"
        return name
    facts = _relevant_arguments(arguments)
    if not are_weights_local():
        return _digest(facts)
    try:
        path = find_local_files(name, arguments["revision"], arguments["download_dir"])
        facts["files"] = _weights_digest(path, str(arguments["load_format"]))
        facts["effective"] = _effective_config(server, path)
    except (FilesNotFound, OSError) as error:
        raise CanopyError(
            f"{_BACKEND}: cannot tell the pages of model {name} from another model's "
            f"({error}); give --model-path a local folder, or run without the disk tier"
        ) from error
    return _digest(facts)


def are_weights_local() -> bool:
    """Return whether weights, if any, are loaded from files of this machine."""
    try:
        get_server_args()
    except ValueError:  # no server around it (tests, benchmarks)
        return True
    arguments = get_context().resolved_server_args_dict()
    return (
        arguments["load_format"] not in _REMOTE_LOAD_FORMATS
        and not arguments["modelexpress_config"]
        and arguments["weight_cache_mode"] in (None, "off")
    )


def _relevant_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that can change KV; of files that they name, digests of the content."""
    facts = {name: value for name, value in arguments.items() if name not in LEAVES_KV}
    for name, value in facts.items():
        if (
            name.endswith(_FILE_ARGUMENT_SUFFIXES)
            and isinstance(value, str)
            and Path(value).exists()
        ):
            facts[name] = path_digest(Path(value))
    return facts


def _weights_digest(path: Path, load_format: str) -> str:
    return "dummy" if load_format == "dummy" else model_digest(path)


def _effective_config(server: Any, path: Path) -> dict[str, Any]:
    """Return the model's configuration with ``--json-model-override-args`` applied."""
    from sglang.srt.configs.model_config import ModelConfig

    # If the snapshot has only weights, let SGLang locate the configuration.
    local_path = str(path) if path.is_file() or (path / "config.json").exists() else None
    config = ModelConfig.from_server_args(server, model_path=local_path).hf_config.to_dict()
    return {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}


def _digest(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True, default=_serialise)
    return hashlib.sha256(text.encode()).hexdigest()


def _serialise(value: Any) -> Any:
    """Serialise values that JSON lacks, identically in every process."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


# ---- adapters ----


def _adapters_digest() -> str | None:
    """Return a digest of the adapters of ``--lora-paths`` whose ids do not depend on content."""
    try:
        adapters = get_context().resolved_server_args_dict()["lora_paths"] or ()
    except ValueError:
        return None
    sglang_id = inspect.unwrap(LoRARef.deterministic_id)
    digests = {}
    for adapter in adapters:
        if isinstance(adapter, str):  # not resolved by SGLang (tests)
            continue
        identity, name, path = (adapter[f"lora_{key}"] for key in ("id", "name", "path"))
        if Path(path).exists() and identity == adapter_id(sglang_id, name, path):
            continue
        try:
            digests[identity] = full_digest(find_local_files(path))
        except (FilesNotFound, OSError) as error:
            raise CanopyError(
                f"{_BACKEND}: cannot tell the pages of adapter {name!r} from another one's "
                f"({error}); give --lora-paths a local folder, or run without the disk tier"
            ) from error
    return _digest(digests) if digests else None
