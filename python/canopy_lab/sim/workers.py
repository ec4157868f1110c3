"""Run functions on one shared object, in this process or in spawned ones."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from sglang_canopy.errors import CanopyError

Work = TypeVar("Work")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers(Generic[Work]):
    """A pool of processes, started at the first ``map``. A context manager.

    Each process loads ``work`` once, from a file that only this user can read.
    """

    def __init__(self, work: Work, jobs: int) -> None:
        self._work, self._jobs = work, jobs
        self._pool: ProcessPoolExecutor | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def map(
        self, run: Callable[[Work, Item], Result], items: Sequence[Item]
    ) -> Iterator[tuple[int, Result]]:
        """Iterate over (index, run(work, item)) in order of completion.

        ``run`` must be importable. Raises ``CanopyError`` if a process was killed.
        """
        if self._jobs == 1:
            for index, item in enumerate(items):
                yield index, run(self._work, item)
            return
        pool, path = self._start_pool()
        try:
            futures = {
                pool.submit(_run_loaded, path, run, item): index for index, item in enumerate(items)
            }
            for future in as_completed(futures):
                yield futures.pop(future), future.result()
        except BrokenProcessPool:
            raise CanopyError(
                "a simulation process was killed, most likely for memory; use fewer --jobs"
            ) from None

    def __enter__(self) -> Workers[Work]:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._pool is not None and self._folder is not None:
            self._pool.shutdown(cancel_futures=True)
            self._folder.cleanup()

    def _start_pool(self) -> tuple[ProcessPoolExecutor, str]:
        """Return the pool and the path of the pickled work, starting them if needed."""
        if self._pool is None or self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="canopy-work-")
            path = Path(self._folder.name) / "work"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                pickle.dump(self._work, file, protocol=pickle.HIGHEST_PROTOCOL)
            self._pool = ProcessPoolExecutor(
                max_workers=self._jobs, mp_context=multiprocessing.get_context("spawn")
            )
        return self._pool, str(Path(self._folder.name) / "work")


_loaded: dict[str, Any] = {}


def _run_loaded(path: str, run: Callable[[Any, Item], Result], item: Item) -> Result:
    if path not in _loaded:
        with open(path, "rb") as file:
            _loaded[path] = pickle.load(file)  # written by the process that started this one
    return run(_loaded[path], item)
