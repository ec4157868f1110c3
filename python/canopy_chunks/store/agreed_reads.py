"""Agreement among ranks on the chunks that every rank could read from disk, at one point of a step.

Each rank has its own files, and a file may be unreadable on one rank only. Ranks wait for each
other during planning (partial sums, scores), so a failed read on one rank would block the others
for ever. A chunk dropped by one rank alone would make its later plans differ. Therefore, before a
batch is planned, each rank reads the chunks that its prompts need, and one all-reduce finds those
that all ranks have, as SGLang does for pages that HiCache prefetches. If a rank lacks a chunk, all
ranks delete it and compute its tokens.
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
    """The chunks of one batch that every rank has read in full, kept until the batch is planned.

    true_on_all: returns which flags of a list are true on every rank; collective, one all-reduce.
    """

    def __init__(self, reads: ReadAhead, true_on_all: Callable[[list[bool]], list[bool]]) -> None:
        self._reads, self._true_on_all = reads, true_on_all
        self._read: dict[str, Chunk] = {}

    def read(self, store: ChunkStore, wanted: Callable[[], Sequence[str]]) -> None:
        """Read the disk chunks of the keys that ``wanted`` returns, which are equal on all ranks.

        Collective if there are any. ``wanted`` is called again until no key is left to read, since
        it may return another variant of a document in place of a deleted chunk.
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
        """Return the chunk, if it was read."""
        return self._read.get(key)

    def clear(self) -> None:
        """Drop the chunks; the plans of a planned batch hold references to the chunks in use."""
        self._read.clear()

    def _load(self, store: ChunkStore, key: str) -> Chunk | None:
        chunk = store.look(key)
        assert isinstance(chunk, DiskChunk), f"{key} is not on disk"
        try:
            return self._reads.take(key) or chunk.load()
        except (CanopyError, OSError) as error:
            logger.warning("canopy: %s", error)
            return None
