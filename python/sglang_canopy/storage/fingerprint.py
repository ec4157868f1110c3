"""What files hold, as digests: of a model's weights by sample, of an adapter's in full."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_KINDS = (*_WEIGHTS, ".json", ".py")
"""Files that decide what KV a model computes: its weights, its configuration, its code."""
_SAMPLE_BYTES = 16_384
_SAMPLES = 8


class NotFound(Exception):
    """The files are not on this machine. Says why."""


def local_files(name: str, revision: str | None = None, *caches: str | None) -> Path:
    """Where the files of ``name`` are: a path, or the local snapshot of a hub id.

    Looks into ``caches`` (``None``: the hub's default folder); never downloads. Raises
    ``NotFound``.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    import huggingface_hub

    for cache in dict.fromkeys((*caches, None)):
        try:
            found = huggingface_hub.snapshot_download(
                name, revision=revision, cache_dir=cache, local_files_only=True
            )
            return Path(found)
        except Exception:  # its errors have no common base: "not there" is all that matters
            continue
    raise NotFound("it is neither a path nor a hub snapshot on this machine")


def sampled(path: Path) -> str:
    """A digest of names, sizes, modification times, and a sample of the bytes of every file.

    Reads at most 128 KiB a file. Raises ``NotFound`` where there are no weights.
    """
    if not any(file.suffix in _WEIGHTS for file in _files(path)):
        raise NotFound(f"there are no weights ({', '.join(_WEIGHTS)}) in {path}")
    return _sampled(path, _files(path))


def sampled_files(path: Path) -> str:
    """The same of a file, or of every file of a folder."""
    every = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return _sampled(path, every)


def _sampled(path: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        name = file.name if file == path else file.relative_to(path).as_posix()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with file.open("rb") as handle:
            for at in _positions(status.st_size):
                handle.seek(at)
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def whole(path: Path) -> str:
    """A digest of the names and all bytes of a file, or of the files right in a folder.

    The same on every machine that has the same files.
    """
    digest = hashlib.sha256()
    for file in _files(path):
        if file.parent != path and file != path:
            continue  # SGLang reads nothing of an adapter from there
        content = xxhash.xxh3_128()
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 22):
                content.update(chunk)
        digest.update(f"{file.name}\0{content.hexdigest()}\0".encode())
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    """The model's files at ``path`` and below, in one order everywhere."""
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(_KINDS) and not name.startswith("."):
                yield Path(folder, name)


def _positions(size: int) -> Iterator[int]:
    """Where samples begin, from the first bytes to the last."""
    if size <= _SAMPLES * _SAMPLE_BYTES:
        yield from range(0, size, _SAMPLE_BYTES)
        return
    last = size - _SAMPLE_BYTES
    yield from (last * i // (_SAMPLES - 1) for i in range(_SAMPLES))
