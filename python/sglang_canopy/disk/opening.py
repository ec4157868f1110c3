"""The part of the disk store that takes its folder, at the start or later, and gives it back."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

from sglang_canopy.disk.content import Content
from sglang_canopy.disk.folder import Claim, Unavailable, claim
from sglang_canopy.disk.index import PageIndex
from sglang_canopy.disk.journal import Journal, damaged, kind_of
from sglang_canopy.disk.records import load_rows
from sglang_canopy.disk.segments import Segments, Units
from sglang_canopy.disk.upkeep import Upkeep


class Opening(Upkeep):
    """Base of ``DiskStore``."""

    content: Content
    journal: Journal
    path: Path
    _claim: Claim | None
    _folder: str | os.PathLike[str]
    _namespace: str
    _temporary: bool

    def open(self) -> bool:
        """Take the folder and load its index; ``unavailable`` says why where that fails.

        Call it again until it is true: what keeps the folder may pass. By one thread at a time.
        """
        if self.unavailable is None:
            return True
        try:
            self._claim = claim(self._folder, self._namespace, temporary=self._temporary)
            self.path = self._claim.path
            self.segments = Segments(self.path, self.content.unit_bytes)
            self.journal = Journal(self.path)
            with self.lock:
                self._load()
                self.unavailable = None
        except Unavailable as why:
            self._give_up(why.fault, why)
        except (OSError, sqlite3.Error) as error:
            self._give_up(kind_of(error), error)
        else:
            self.flush(everything=True)
        return self.unavailable is None

    def discard(self) -> None:
        """Close, and remove every page from the disk: nobody will ask for them again."""
        claim, self._claim = self._claim, None  # keep the folder until the pages are gone
        self.close()
        with self.lock:
            self._forget_rows()
        if claim is not None:
            claim.remove_pages()
            claim.release()

    def close(self) -> None:
        raise NotImplementedError

    def _load(self) -> None:
        now = self.clock()
        try:
            self.journal.open()
            renumbered = load_rows(self, now)  # type: ignore[arg-type]
        except sqlite3.Error as error:
            if not damaged(error):
                raise
            self.faults.note("index", error)
            self.index = PageIndex()
            self.shelf.index = self.index
            self.journal.start_over()
            renumbered = False
        if renumbered:
            self.journal.start_over()
            self._dirty.update(self.index.rows.values())
        self._shrink_to_fit(now)
        cut = self.segments.trim(self.units.top)
        self.counters.orphans += cut // self.content.unit_bytes

    def _give_up(self, fault: str, why: object) -> None:
        with self.lock:
            if str(why) != self.unavailable:
                self.unavailable = str(why)
                self.faults.note(fault, why)
            self._forget_rows()
        if self._claim is not None:
            self.journal.close()
            self.segments.close()
            self._claim.release()
            self._claim = None

    def _forget_rows(self) -> None:
        """What the policy learnt and the TTLs stay; the pages go."""
        for row in self.index.rows.values():
            self.shelf.take_off(row)
            self.shelf.gone(row, None, self.index.stored[row], chosen=False)
        self.index = PageIndex()
        self.shelf.index = self.index
        self.units = Units(self.units.limit)
        self._dirty.clear()
        self._stale.clear()
