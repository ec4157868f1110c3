"""Where simulations run: in this process, on all cores, or on a Ray cluster.

A backend has ``map(run, items)``, which yields ``(index, run(work, item))`` as they come, and
``close()``. ``run`` is a function of a module, so that another process finds it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Protocol, TypeVar

from canopy_lab.compiled.finder import use as use_compiled
from canopy_lab.plan.worker import PlanInputs
from sglang_canopy.errors import CanopyError

NAMES = ("local", "ray")

Item = TypeVar("Item")
Done = TypeVar("Done")


class Backend(Protocol):
    """Runs functions on one ``PlanInputs``."""

    def map(
        self, run: Callable[[PlanInputs, Item], Done], items: Sequence[Item]
    ) -> Iterator[tuple[int, Done]]: ...

    def close(self) -> None: ...


def make_backend(name: str, work: PlanInputs, jobs: int) -> Backend:
    """``local`` or ``ray``. Raises ``CanopyError``."""
    if name not in NAMES:
        raise CanopyError(f"unknown backend {name!r}; choose one of: {', '.join(NAMES)}")
    if jobs < 1:
        raise CanopyError(f"--jobs must be 1 or more, got {jobs}")
    if name == "ray":
        return _Ray(work)
    return Inline(work) if jobs == 1 else _Processes(work, jobs)


class Inline:
    """In this process."""

    def __init__(self, work: PlanInputs) -> None:
        self._work = work

    def map(
        self, run: Callable[[PlanInputs, Item], Done], items: Sequence[Item]
    ) -> Iterator[tuple[int, Done]]:
        for at, item in enumerate(items):
            yield at, run(self._work, item)

    def close(self) -> None:
        self._work.forget()


class _Processes:
    """Spawned processes. Each loads the trace once, from a file that only this user can read."""

    def __init__(self, work: PlanInputs, jobs: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="canopy-plan-")
        path = Path(self._folder.name) / "work"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            pickle.dump(work, file, protocol=pickle.HIGHEST_PROTOCOL)
        self._path = str(path)
        self._pool = ProcessPoolExecutor(
            max_workers=jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=use_compiled,
        )

    def map(
        self, run: Callable[[PlanInputs, Item], Done], items: Sequence[Item]
    ) -> Iterator[tuple[int, Done]]:
        try:
            futures = {
                self._pool.submit(_in_process, self._path, run, item): at
                for at, item in enumerate(items)
            }
            for future in as_completed(futures):
                yield futures.pop(future), future.result()
        except BrokenProcessPool:
            raise CanopyError(
                "a simulation process was killed, most likely for memory; use fewer --jobs "
                "(what is done is kept)"
            ) from None

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()


class _Ray:
    """Tasks on a Ray cluster; the trace travels once, through Ray's object store.

    ``RAY_ADDRESS`` says which cluster; without it Ray starts one on this machine.
    """

    def __init__(self, work: PlanInputs) -> None:
        try:
            import ray
        except ImportError:
            raise CanopyError(
                "--backend ray needs Ray: pip install ray (the same version as the cluster's), "
                "or leave the option out to use this machine's cores"
            ) from None
        self._ray, self._started = ray, not ray.is_initialized()
        if self._started:
            ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        self._work = ray.put(work)

    def map(
        self, run: Callable[[PlanInputs, Item], Done], items: Sequence[Item]
    ) -> Iterator[tuple[int, Done]]:
        remote = self._ray.remote(run)
        waiting = {remote.remote(self._work, item): at for at, item in enumerate(items)}
        while waiting:
            ready, _ = self._ray.wait(list(waiting), num_returns=1)
            for done in ready:
                yield waiting.pop(done), self._ray.get(done)

    def close(self) -> None:
        if self._started:
            self._ray.shutdown()


_loaded: dict[str, PlanInputs] = {}


def _in_process(path: str, run: Callable[[PlanInputs, Item], Done], item: Item) -> Done:
    if path not in _loaded:
        with open(path, "rb") as file:
            _loaded[path] = pickle.load(file)  # written by the process that started this one
    return run(_loaded[path], item)
