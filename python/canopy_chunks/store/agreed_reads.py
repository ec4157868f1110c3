"""Ranks agree on which chunks could be read from their disks, at one point of a step.

Each rank has files of its own, and one may fail where the other's is whole. Planning has ranks wait
for each other (partial sums, scores), so a read that failed there on one rank would leave the others
waiting for ever; and a chunk that only one of them forgot would have them plan differently from then
on. So before a batch is planned each rank reads what its prompts need, and one all-reduce says what
all of them have: SGLang does the same with pages that HiCache prefetches. What a rank lacks is
deleted by all and its tokens are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from canopy_chunks.store.chunk import Chunk
from canopy_chunks.store.disk import DiskChunk
from canopy_chunks.store.read_ahead import ReadAhead
from canopy_chunks.store.store import ChunkStore
from sglang_canopy.errors import CanopyError

logger = logging.getLogger(__name__)


class AgreedReads:
    """The chunks of one batch that every rank has read, whole, until it is planned.

    true_on_all: which of a list's statements hold on every rank; collective, one all-reduce.
    """

    def __init__(self, reads: ReadAhead, true_on_all: Callable[[list[bool]], list[bool]]) -> None:
        self._reads, self._true_on_all = reads, true_on_all
        self._read: dict[str, Chunk] = {}

    def read(self, store: ChunkStore, wanted: Callable[[], Sequence[str]]) -> None:
        """Read the chunks on disk that ``wanted`` names, which all ranks see alike, by their keys.

        Collective where there are any. It is asked again until nothing is left to read: instead of
        a chunk that was deleted another variant of its document may be wanted.
        """
        self.clear()
        while keys := [key for key in dict.fromkeys(wanted()) if key not in self._read]:
            found = [self._load(store, key) for key in keys]
            everywhere = self._true_on_all([chunk is not None for chunk in found])
            for key, chunk, agreed in zip(keys, found, everywhere):
                if agreed and chunk is not None:
                    self._read[key] = chunk
                else:
                    logger.warning("canopy: chunk %s is not readable on every rank", key[:12])
                    store.delete(key)

    def take(self, key: str) -> Chunk | None:
        """The chunk, if it was read."""
        return self._read.get(key)

    def clear(self) -> None:
        """The batch is planned: its plans hold what they need."""
        self._read.clear()

    def _load(self, store: ChunkStore, key: str) -> Chunk | None:
        chunk = store.look(key)
        assert isinstance(chunk, DiskChunk), f"{key} is not on disk"
        try:
            return self._reads.take(key) or chunk.load()
        except (CanopyError, OSError) as error:
            logger.warning("canopy: %s", error)
            return None
