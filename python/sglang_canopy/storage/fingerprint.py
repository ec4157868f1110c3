"""Digests of files: of a model's weights by sampling, of an adapter's in full."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_MODEL_SUFFIXES = (*_WEIGHT_SUFFIXES, ".json", ".py")
"""Suffixes of files that determine a model's KV: weights, configuration, code."""
_HEAD_BYTES = 1 << 20
"""Bytes read from the start of each file, with the header of a weight file."""
_SAMPLE_BYTES = 4096
_STRIDE_BYTES = 4 << 20
"""Distance of the samples behind the head."""


class FilesNotFound(Exception):
    """The files are not on this machine."""


def find_local_files(name: str, revision: str | None = None, *caches: str | None) -> Path:
    """Return the path of ``name``: a path, or the local snapshot of a hub id. Snapshots are searched in
    ``caches`` (``None``: the hub's default folder), without downloads. Raises ``FilesNotFound``."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    import huggingface_hub

    for cache in dict.fromkeys((*caches, None)):
        try:
            snapshot = huggingface_hub.snapshot_download(
                name, revision=revision, cache_dir=cache, local_files_only=True
            )
            return Path(snapshot)
        except Exception:  # the hub's errors have no common base; all mean "not found"
            continue
    raise FilesNotFound("it is neither a path nor a hub snapshot on this machine")


def model_digest(path: Path) -> str:
    """Return a digest of the names, sizes and sampled bytes of the model's files. A copy elsewhere has
    the same digest. Raises ``FilesNotFound`` if there are no weights."""
    if not any(file.suffix in _WEIGHT_SUFFIXES for file in _model_files(path)):
        raise FilesNotFound(f"there are no weights ({', '.join(_WEIGHT_SUFFIXES)}) in {path}")
    return _digest_of_samples(path, _model_files(path))


def path_digest(path: Path) -> str:
    """Return the same digest for a file, or for all files of a folder, of any kind."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return _digest_of_samples(path, files)


def _digest_of_samples(path: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        size_bytes = file.stat().st_size
        name = "" if file == path else file.relative_to(path).as_posix()
        digest.update(f"{name}\0{size_bytes}\0".encode())
        with file.open("rb", buffering=0) as handle:
            digest.update(handle.read(_HEAD_BYTES))
            last_offset = max(0, size_bytes - _SAMPLE_BYTES)
            for offset in (*range(_HEAD_BYTES, size_bytes, _STRIDE_BYTES), last_offset):
                handle.seek(offset)
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def full_digest(path: Path) -> str:
    """Return a digest of the names and all bytes of a file, or of the files directly in a folder.
    Machines with the same files get the same digest."""
    digest = hashlib.sha256()
    for file in _model_files(path):
        if file.parent != path and file != path:
            continue  # SGLang reads no adapter files from subfolders
        content = xxhash.xxh3_128()
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 22):
                content.update(chunk)
        digest.update(f"{file.name}\0{content.hexdigest()}\0".encode())
    return digest.hexdigest()


def _model_files(path: Path) -> Iterator[Path]:
    """Iterate over the model's files at and below ``path``, in the same order on every machine."""
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(_MODEL_SUFFIXES) and not name.startswith("."):
                yield Path(folder, name)
