"""A chunk in a file: one record per layer and token, so that any set of tokens can be read alone.

8 bytes  magic, 8 bytes header length, JSON header (tokens, document, shape, dtype, scores,
checksum of the checksums), padding to 4096
checksums  [layers, n] uint64
records    [layers, n, 2, kv_heads, d]: K before RoPE, then V

Not a safetensors file: that has no checksums, and stores a tensor in one piece, so that K and V of
a token are far apart and nothing can be checked without reading all of it. A record's checksum is
the sum of its 32-bit words weighted by odd numbers, mod 2^64: any single changed word changes it.

If few of a layer's records are wanted, the kernel's read-ahead is off: the wanted records are
known, and the distance between them need not be read. Several layers are requested at once
(:meth:`DiskChunk.expect`), so that the disk has a queue while the first of them are checked and
placed. If most records are wanted, they are read sequentially. Files are read, not mapped: a mapped
file that was truncated, or that the disk cannot read, ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import os
import threading
import weakref
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from canopy_chunks.store.chunk import Chunk
from canopy_chunks.store.host_memory import HostChunk
from sglang_canopy.errors import CanopyError

MAGIC = b"CANOPYC2"
ALIGN = 4096
MAX_GAP = 4
"""Unwanted pages read along with wanted pages: a second disk request would take about as long."""
SCATTERED = 0.5
"""Largest wanted share of a layer's pages at which the kernel's read-ahead is off."""
MAX_OPEN = 128
"""Maximum number of open chunk files: a process has a limit, shared with its sockets."""

_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags of files that are read: a named pipe would block without the second."""


class _File:
    """A file that stays open until its last reader is done, even if it is deleted.

    scattered: whether the kernel's read-ahead is off.
    """

    def __init__(self, path: Path) -> None:
        self.scattered = False
        self.number = os.open(path, _TO_READ)

    def __del__(self) -> None:
        if hasattr(self, "number") and os is not None:  # ``os`` is None at interpreter exit
            os.close(self.number)


class _OpenFiles:
    """The open files of the ``MAX_OPEN`` most recently read chunks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: OrderedDict[int, weakref.ref[DiskChunk]] = OrderedDict()

    def of(self, chunk: DiskChunk) -> _File:
        """Return a chunk's file. Raises OSError."""
        with self._lock:
            file = chunk.file = chunk.file or _File(chunk.path)
            self._chunks.pop(id(chunk), None)
            self._chunks[id(chunk)] = weakref.ref(chunk)
            while len(self._chunks) > MAX_OPEN:
                oldest = self._chunks.popitem(last=False)[1]()
                if oldest is not None:
                    oldest.file = None
        return file


_open_files = _OpenFiles()


@dataclass(slots=True, eq=False, weakref_slot=True)
class DiskChunk:
    """A chunk whose KV stays in its file until rows are read; stands in for a ``Chunk``.

    sums: the records' checksums, ``[layers, n]``; start: offset of the records in the file, in
    bytes; bytes_read: bytes of records read; file: the open file.
    """

    path: Path
    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    scores: dict[str, torch.Tensor]
    document: str
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sums: np.ndarray
    start: int
    bytes_read: int = 0
    file: _File | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def layers(self) -> int:
        return len(self.sums)

    @property
    def record_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of K and V in the file."""
        return self.sums.size * self.record_bytes

    def expect(self, layer: int, tokens: torch.Tensor) -> None:
        """Announce that these tokens' records will be read.

        If they are few, the kernel starts to read only them and small gaps between them. Does not
        wait.
        """
        if not tokens.numel():
            return
        first, record = self.start + layer * len(self) * self.record_bytes, self.record_bytes
        starts = (first + tokens.numpy() * record) // mmap.PAGESIZE
        ends = (first + tokens.numpy() * record + record - 1) // mmap.PAGESIZE + 1
        cuts = _cuts(starts, ends, MAX_GAP)
        starts, ends = starts[[0, *cuts]], ends[[*(cuts - 1), -1]]
        scattered = int((ends - starts).sum()) * mmap.PAGESIZE < SCATTERED * len(self) * record
        try:
            file = _open_files.of(self)
        except OSError:  # the read will raise the same error
            return
        if scattered != file.scattered:
            file.scattered = scattered
            advice = os.POSIX_FADV_RANDOM if scattered else os.POSIX_FADV_NORMAL
            os.posix_fadvise(file.number, 0, 0, advice)
        if scattered:
            for page, end in zip(starts.tolist(), ends.tolist()):
                at, size = page * mmap.PAGESIZE, (end - page) * mmap.PAGESIZE
                os.posix_fadvise(file.number, at, size, os.POSIX_FADV_WILLNEED)

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K (before RoPE) and V ``[m, kv_heads, d]`` of these sorted tokens; reads only
        these and small gaps.

        Raises CanopyError if a record cannot be read or differs from the written one.
        """
        index = tokens.numpy()
        got = self._read(layer, index)
        bad = np.flatnonzero(_checksums(got) != self.sums[layer][index])
        if bad.size:
            raise CanopyError(
                f"chunk file {self.path.name} is damaged at layer {layer}, token "
                f"{int(index[bad[0]])}: delete it, and the chunk is encoded again"
            )
        self.bytes_read += got.nbytes
        raw = torch.from_numpy(got.reshape(-1)).view(self.dtype)
        raw = raw.view(len(index), 2, self.kv_heads, self.head_dim)
        return raw[:, 0], raw[:, 1]

    def _read(self, layer: int, index: np.ndarray) -> np.ndarray:
        """Return ``[m, words]`` int32: the records of sorted tokens ``index [m]``."""
        record, begin = self.record_bytes, self.start + layer * len(self) * self.record_bytes
        found = np.empty((len(index), record // 4), np.int32)
        if not len(index):
            return found
        cuts = _cuts(index, index + 1, MAX_GAP * mmap.PAGESIZE // record)
        try:
            file = _open_files.of(self)
            for a, b in zip([0, *cuts], [*cuts, len(index)]):
                first, end = int(index[a]), int(index[b - 1]) + 1
                whole = end - first == b - a
                run = found[a:b] if whole else np.empty((end - first, record // 4), np.int32)
                _fill(file.number, run, begin + first * record)
                if not whole:
                    np.take(run, index[a:b] - first, 0, found[a:b], mode="clip")
        except OSError as error:
            raise CanopyError(
                f"chunk file {self.path.name} is damaged, {error}: delete it, and the chunk is "
                "encoded again"
            ) from None
        return found

    @property
    def raw_k(self) -> torch.Tensor:
        """All keys; reads the whole file."""
        return self._all(0)

    @property
    def v(self) -> torch.Tensor:
        """All values; reads the whole file."""
        return self._all(1)

    def _all(self, which: int) -> torch.Tensor:
        every = torch.arange(len(self))
        return torch.stack([self.rows(layer, every)[which] for layer in range(self.layers)])

    def load(self) -> Chunk:
        """Return the whole chunk in host memory."""
        every = torch.arange(len(self))
        both = [self.rows(layer, every) for layer in range(self.layers)]
        k, v = (torch.stack([b[i] for b in both]) for i in range(2))
        return Chunk(self.ids, k, v, self.prefix, dict(self.scores), self.document)


def write(path: Path, chunk: Chunk | HostChunk) -> int:
    """Write a chunk atomically. Returns the file's size in bytes."""
    both = torch.stack([chunk.raw_k, chunk.v], dim=2).contiguous().cpu()
    layers, n, _, heads, dim = both.shape
    width = 2 * heads * dim * both.element_size() // 4
    records = both.reshape(-1).view(torch.int32).numpy().reshape(layers, n, width)
    sums = _checksums(records)
    header = _encode_header(chunk, zlib.crc32(sums.tobytes()))
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        # Readable by its owner only: a tenant's text can be recovered from it.
        with os.fdopen(os.open(temporary, mode, 0o600), "wb") as f:
            f.write(header)
            f.write(sums.tobytes())
            f.write(records.tobytes())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def _encode_header(chunk: Chunk | HostChunk, sums_crc: int) -> bytes:
    """Return the part before the checksums, padded; its size depends only on tokens and scores."""
    layers, n, heads, dim = chunk.raw_k.shape
    raw = json.dumps(
        {
            "ids": list(chunk.ids),
            "prefix": list(chunk.prefix),
            "document": chunk.document,
            "shape": [layers, n, heads, dim],
            "dtype": str(chunk.raw_k.dtype).removeprefix("torch."),
            "scores": {k: v.tolist() for k, v in chunk.scores.items()},
            "sums_crc": f"{sums_crc:08x}",
        }
    ).encode()
    raw = MAGIC + len(raw).to_bytes(8, "little") + zlib.crc32(raw).to_bytes(4, "little") + raw
    return raw + bytes(-len(raw) % ALIGN)


def lost_chunk(path: Path, chunk: Chunk | HostChunk) -> DiskChunk:
    """Return a placeholder of equal size for an unwritten chunk; reading it raises."""
    layers, n, heads, dim = chunk.raw_k.shape
    sums, start = np.zeros((layers, n), np.uint64), len(_encode_header(chunk, 0)) + 8 * layers * n
    return DiskChunk(
        path, chunk.ids, chunk.prefix, {}, chunk.document, heads, dim, chunk.raw_k.dtype, sums, start
    )  # fmt: skip


def file_size(chunk: Chunk | HostChunk | DiskChunk) -> int:
    """Return the size of a chunk's file in bytes."""
    if isinstance(chunk, DiskChunk):
        return chunk.start + chunk.nbytes
    layers, n = chunk.raw_k.shape[:2]
    return len(_encode_header(chunk, 0)) + 8 * layers * n + chunk.nbytes


def open_chunk(path: Path) -> DiskChunk:
    """Read a file's header and checksums. Raises CanopyError if it is damaged or cannot be read."""
    try:
        with os.fdopen(os.open(path, _TO_READ), "rb") as f:
            head = _header(f, path.name)
            layers, n, heads, dim = head["shape"]
            sums = f.read(8 * layers * n)
            start, size = f.tell(), os.fstat(f.fileno()).st_size
    except OSError as error:
        raise CanopyError(f"chunk file {path.name} cannot be read: {error}") from None
    if f"{zlib.crc32(sums):08x}" != head["sums_crc"]:
        raise CanopyError(f"chunk file {path.name} has damaged checksums: delete it")
    scores = {k: torch.tensor(v) for k, v in head["scores"].items()}
    found = DiskChunk(
        path, tuple(head["ids"]), tuple(head["prefix"]), scores, head["document"], heads, dim,
        getattr(torch, head["dtype"]), np.frombuffer(sums, np.uint64).reshape(layers, n), start,
    )  # fmt: skip
    if size != file_size(found):
        raise CanopyError(
            f"chunk file {path.name} is {size} bytes, not {file_size(found)}: delete it"
        )
    return found


def _header(f: BinaryIO, name: str) -> dict[str, Any]:
    """Return the header of an open file, leaving the file positioned at its checksums."""
    start = f.read(20)
    size = int.from_bytes(start[8:16], "little")
    whole = start[:8] == MAGIC and size < os.fstat(f.fileno()).st_size
    raw = f.read(size) if whole else b""
    if not whole or zlib.crc32(raw) != int.from_bytes(start[16:20], "little"):
        raise CanopyError(f"{name} is truncated or not a chunk file: delete it")
    f.seek(-f.tell() % ALIGN, os.SEEK_CUR)
    return json.loads(raw)  # type: ignore[no-any-return]


def _fill(file: int, out: np.ndarray, at: int) -> None:
    """Read ``out`` from position ``at`` of an open file. Raises OSError at the file's end."""
    left = memoryview(out.data).cast("B")
    while left:
        count = os.preadv(file, [left], at)
        if not count:
            raise OSError("the file is truncated")
        left, at = left[count:], at + count


def _cuts(starts: np.ndarray, ends: np.ndarray, gap: int) -> np.ndarray:
    """Return the indices of sorted spans that begin more than ``gap`` after the previous span."""
    return np.flatnonzero(starts[1:] - ends[:-1] > gap) + 1


@functools.lru_cache(4)
def _weights(width: int) -> np.ndarray:
    """Return odd 64-bit weights, one per word."""
    step = np.uint64(0x9E3779B97F4A7C15)
    return (np.arange(1, width + 1, dtype=np.uint64) * step) | np.uint64(1)


def _checksums(records: np.ndarray) -> np.ndarray:
    """Map ``[..., words]`` int32 to ``[...]`` uint64. A constant keeps blank records from 0."""
    words = records.view(np.uint32).astype(np.uint64)
    weighted = (words * _weights(words.shape[-1])).sum(axis=-1, dtype=np.uint64)
    return weighted + np.uint64(0x5EED)
