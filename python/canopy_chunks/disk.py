"""A chunk in a file: one record a layer and token, so that any set of tokens can be read alone.

    8 bytes  magic, 8 bytes header length, JSON header (tokens, shape, dtype, scores, checksum of
             the checksums), padding to 4096
    checksums  [layers, n] uint64
    records    [layers, n, 2, kv_heads, d]: K before RoPE, then V

Not a safetensors file: that has no checksums, and keeps a tensor in one piece, so that K and V of
a token lie far apart and nothing can be checked without reading all of it. A record's checksum is
its 32-bit words weighted by odd numbers, mod 2^64: any changed word shows.

Where few of a layer's records are wanted, the kernel's read-ahead is off: they are known, and what lies
far between them is not read. Several layers' are asked for at once (:meth:`DiskChunk.expect`), so that
the disk has a queue to work on while the first of them are checked and placed. Where most are wanted,
reading in a row is what a disk does best, and is left to the kernel.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from canopy_chunks.chunk import Chunk
from canopy_chunks.host_memory import HostChunk
from sglang_canopy.errors import CanopyError

MAGIC = b"CANOPYC1"
ALIGN = 4096
MOST_GAP = 4
"""Unwanted pages between wanted ones that are read with them: a second request of the disk takes as
long as about so many pages in a row."""
SCATTERED = 0.5
"""Of a layer's pages, up to which share of wanted ones the kernel's read-ahead is off."""


@dataclass(slots=True)
class DiskChunk:
    """A chunk whose KV stays in its file until rows are asked for; stands in for a ``Chunk``.

    bytes_read counts what left the file (records only). mapped: the file, of which ``records`` is a
    part; None where there is nothing to read.
    """

    path: Path
    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    scores: dict[str, torch.Tensor]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sums: np.ndarray
    records: np.ndarray
    mapped: mmap.mmap | None = None
    bytes_read: int = 0
    _scattered: bool = False
    _weights: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V in the file."""
        return int(self.records.nbytes)

    def expect(self, layer: int, tokens: torch.Tensor) -> None:
        """These tokens' records will be read: where they are few, the kernel begins to read them, and
        small gaps between them, and nothing else. Nothing is waited for."""
        if self.mapped is None or not tokens.numel():
            return
        record = 4 * self.records.shape[2]
        first = len(self.mapped) - self.records.nbytes + layer * len(self) * record
        starts = (first + tokens.numpy() * record) // mmap.PAGESIZE
        ends = (first + tokens.numpy() * record + record - 1) // mmap.PAGESIZE + 1
        cuts = np.flatnonzero(starts[1:] - ends[:-1] > MOST_GAP) + 1
        starts, ends = starts[[0, *cuts]], ends[[*(cuts - 1), -1]]
        scattered = int((ends - starts).sum()) * mmap.PAGESIZE < SCATTERED * len(self) * record
        if scattered != self._scattered:
            self.mapped.madvise(mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL)
            self._scattered = scattered
        if scattered:
            for page, end in zip(starts.tolist(), ends.tolist()):
                size = (end - page) * mmap.PAGESIZE
                self.mapped.madvise(mmap.MADV_WILLNEED, page * mmap.PAGESIZE, size)

    def rows(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K (before RoPE) and V ``[m, kv_heads, d]`` of these tokens: the only bytes read.

        Raises CanopyError when a record is not what was written.
        """
        index = tokens.numpy()
        got = self.records[layer][index]
        bad = np.flatnonzero(_checksums(got, self._weights) != self.sums[layer][index])
        if bad.size:
            raise CanopyError(
                f"chunk file {self.path.name} is damaged at layer {layer}, token "
                f"{int(index[bad[0]])}: delete it, and the chunk is encoded again"
            )
        self.bytes_read += got.nbytes
        raw = torch.from_numpy(got.reshape(-1)).view(self.dtype)
        raw = raw.view(len(index), 2, self.kv_heads, self.head_dim)
        return raw[:, 0], raw[:, 1]

    @property
    def raw_k(self) -> torch.Tensor:
        """All keys: a full read."""
        return self._all(0)

    @property
    def v(self) -> torch.Tensor:
        """All values: a full read."""
        return self._all(1)

    def _all(self, which: int) -> torch.Tensor:
        every = torch.arange(len(self))
        return torch.stack([self.rows(layer, every)[which] for layer in range(self.layers)])

    def load(self) -> Chunk:
        """The whole chunk in host memory."""
        every = torch.arange(len(self))
        both = [self.rows(layer, every) for layer in range(self.layers)]
        k, v = (torch.stack([b[i] for b in both]) for i in range(2))
        return Chunk(self.ids, k, v, self.prefix, dict(self.scores))


def write(path: Path, chunk: Chunk | HostChunk) -> int:
    """Write a chunk; the file appears whole or not at all. Returns its size in bytes."""
    both = torch.stack([chunk.raw_k, chunk.v], dim=2).contiguous().cpu()
    layers, n, _, heads, dim = both.shape
    width = 2 * heads * dim * both.element_size() // 4
    records = both.reshape(-1).view(torch.int32).numpy().reshape(layers, n, width)
    sums = _checksums(records, _weights(width))
    header = _encode_header(chunk, zlib.crc32(sums.tobytes()))
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    mode = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        with os.fdopen(
            os.open(temporary, mode, 0o600), "wb"
        ) as f:  # a tenant's text can be read off
            f.write(header)
            f.write(sums.tobytes())
            f.write(records.tobytes())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def _encode_header(chunk: Chunk | HostChunk, sums_crc: int) -> bytes:
    """Everything before the checksums, padded; its size depends on the tokens and scores alone."""
    layers, n, heads, dim = chunk.raw_k.shape
    raw = json.dumps(
        {
            "ids": list(chunk.ids),
            "prefix": list(chunk.prefix),
            "shape": [layers, n, heads, dim],
            "dtype": str(chunk.raw_k.dtype).removeprefix("torch."),
            "scores": {k: v.tolist() for k, v in chunk.scores.items()},
            "sums_crc": f"{sums_crc:08x}",
        }
    ).encode()
    raw = MAGIC + len(raw).to_bytes(8, "little") + zlib.crc32(raw).to_bytes(4, "little") + raw
    return raw + bytes(-len(raw) % ALIGN)


def lost_chunk(path: Path, chunk: Chunk | HostChunk) -> DiskChunk:
    """In place of a chunk that could not be written: as large, and reading it says what is wrong."""
    layers, n, heads, dim = chunk.raw_k.shape
    width = 2 * heads * dim * chunk.raw_k.element_size() // 4
    return DiskChunk(
        path, chunk.ids, chunk.prefix, {}, layers, heads, dim, chunk.raw_k.dtype,
        np.zeros((layers, n), np.uint64), np.broadcast_to(np.int32(0), (layers, n, width)),
        _weights=_weights(width),
    )  # fmt: skip


def file_size(chunk: Chunk | HostChunk | DiskChunk) -> int:
    """Bytes a chunk's file takes."""
    if isinstance(chunk, DiskChunk):
        return chunk.path.stat().st_size
    layers, n = chunk.raw_k.shape[:2]
    return len(_encode_header(chunk, 0)) + 8 * layers * n + chunk.nbytes


def open_chunk(path: Path) -> DiskChunk:
    """Read a file's header and checksums, map its records. Raises CanopyError for a damaged one."""
    head = _header(path)
    layers, n, heads, dim = head["shape"]
    dtype = getattr(torch, head["dtype"])
    width = 2 * heads * dim * torch.empty(0, dtype=dtype).element_size() // 4
    at = head["start"]
    size = at + layers * n * (8 + 4 * width)
    if path.stat().st_size != size:
        raise CanopyError(
            f"chunk file {path.name} is {path.stat().st_size} bytes, not {size}: delete it"
        )
    sums = np.fromfile(path, np.uint64, layers * n, offset=at).reshape(layers, n)
    if f"{zlib.crc32(sums.tobytes()):08x}" != head["sums_crc"]:
        raise CanopyError(f"chunk file {path.name} has damaged checksums: delete it")
    records, mapped = np.empty((layers, 0, width), np.int32), None
    if n:
        with path.open("rb") as f:
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        records = np.frombuffer(mapped, np.int32, layers * n * width, at + 8 * layers * n)
        records = records.reshape(layers, n, width)
    scores = {k: torch.tensor(v) for k, v in head["scores"].items()}
    return DiskChunk(
        path, tuple(head["ids"]), tuple(head["prefix"]), scores, layers, heads, dim, dtype, sums,
        records, mapped, _weights=_weights(width),
    )  # fmt: skip


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as f:
        start = f.read(20)
        size = int.from_bytes(start[8:16], "little")
        whole = start[:8] == MAGIC and size < path.stat().st_size
        raw = f.read(size) if whole else b""
    if not whole or zlib.crc32(raw) != int.from_bytes(start[16:20], "little"):
        raise CanopyError(f"{path.name} is not a whole chunk file: delete it")
    head = json.loads(raw)
    head["start"] = 20 + size + (-(20 + size) % ALIGN)
    return head


def _weights(width: int) -> np.ndarray:
    """Odd 64-bit weights, one a word."""
    step = np.uint64(0x9E3779B97F4A7C15)
    return (np.arange(1, width + 1, dtype=np.uint64) * step) | np.uint64(1)


def _checksums(records: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """``[..., words]`` int32 -> ``[...]`` uint64. The constant keeps a blank record from being 0."""
    words = records.view(np.uint32).astype(np.uint64)
    return (words * weights).sum(axis=-1, dtype=np.uint64) + np.uint64(0x5EED)
