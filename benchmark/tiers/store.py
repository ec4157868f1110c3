"""The disk store against SGLang's ``file`` backend: throughput, latency, memory, sweeper.

    python benchmark/tiers/store.py speed
    python benchmark/tiers/store.py sweeper

Real pages in real files, both backends in one run with the same bytes, through the calls that
HiCache's controller makes. Prints JSON. ``--folder`` holds the files, which are removed afterwards.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
DATA = Path(os.environ.get("CANOPY_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))

POLICIES = ("canopy-lru", "wa")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", choices=tuple(_ANSWERS))
    parser.add_argument("--folder", type=Path, help="where the files go (default: temporary)")
    parser.add_argument("--pages", type=int, default=100_000, help="pages for latencies")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="canopy-store-", dir=options.folder))
    try:
        print(json.dumps(_ANSWERS[options.question](options, folder), indent=1))
    finally:
        shutil.rmtree(folder)


# ---- throughput, latency, memory ----


def speed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "throughput": _throughput(folder),
        "latency": _latency(options, folder),
        "memory": _memory(options, folder),
    }


def _throughput(folder: Path) -> list[dict[str, Any]]:
    """MB/s of writing and reading, in turns, five rounds each; the median counts."""
    from store_backends import CanopyBackend, FileBackend

    from support.store_pool import host_pool

    rows = []
    for label, shape in {
        "4 KiB": {"page_tokens": 4, "layers": 8, "heads": 2, "head_dim": 16},
        "184 KiB": {"page_tokens": 8, "layers": 30, "heads": 3, "head_dim": 64},
        "1.4 MiB": {"page_tokens": 64, "layers": 30, "heads": 3, "head_dim": 64},
    }.items():
        pool = host_pool(64, **shape)
        pool.kv_buffer.normal_()
        size = _page_bytes(pool)
        count = max(64, min(8192, (256 << 20) // size)) // 64 * 64
        found: dict[tuple[str, str], list[float]] = {}
        for turn in range(5):
            for name in ("file", "canopy") if turn % 2 == 0 else ("canopy", "file"):
                place = folder / "speed"
                place.mkdir()
                if name == "file":
                    backend: Any = FileBackend(pool, place, 1 << 40)
                else:
                    backend = CanopyBackend(pool, place, (count + 64) * size)
                for what, seconds in _timed(backend, count).items():
                    found.setdefault((what, name), []).append(count * size / seconds / 1e6)
                backend.close()
                shutil.rmtree(place)
        for what in ("write", "read"):
            mine, theirs = (sorted(found[what, n])[2] for n in ("canopy", "file"))
            rows.append(
                {
                    "page": label,
                    "what": what,
                    "pages": count,
                    "file_mb_s": round(theirs),
                    "canopy_mb_s": round(mine),
                    "ratio": round(mine / theirs, 2),
                }
            )
    return rows


def _timed(backend: Any, count: int) -> dict[str, float]:
    """Seconds to write and to read ``count`` pages, batches of 64 in a chain."""
    keys = list(itertools.islice(_keys("t"), count))
    batches = [keys[i : i + 64] for i in range(0, count, 64)]
    for place in range(64):
        backend.stamp(place, keys[place])
    begin = time.perf_counter()
    for i, batch in enumerate(batches):
        backend.note(batch, _metas(len(batch)), batches[i - 1][-1] if i else None)
        backend.set(batch)
    written = time.perf_counter()
    for batch in batches:
        assert backend.get(batch) == 64
    return {"write": written - begin, "read": time.perf_counter() - written}


def _filled(
    options: argparse.Namespace, make: Callable[[], Any], keep: bool = True
) -> tuple[Any, list[list[str]]]:
    """A backend with paths of 128 pages, ``--pages`` of them in all, and the paths."""
    backend = make()
    paths = []
    names = _keys("p")
    for _ in range(options.pages // 128):
        path = list(itertools.islice(names, 128))
        for first in range(0, 128, backend.batch):
            batch = path[first : first + backend.batch]
            backend.note(batch, _metas(len(batch)), path[first - 1] if first else None)
            backend.set(batch)
        if keep:
            paths.append(path)
    return backend, paths


def _latency(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """P50 and P99 of one call on 128 and on 16 pages of 4 KiB, interleaved."""
    import random

    from store_backends import CanopyBackend, FileBackend

    pool = _small_pool()
    capacity = 2 * options.pages * _page_bytes(pool)
    backends = []
    for name, make in {
        "file": lambda f: FileBackend(pool, f, capacity),
        "canopy": lambda f: CanopyBackend(pool, f, capacity),
    }.items():
        place = folder / f"latency-{name}"
        place.mkdir()
        backends.append((name, *_filled(options, lambda m=make, p=place: m(p))))
    times: dict[tuple[str, int, str], list[float]] = {}
    rng = random.Random(options.seed)
    for _ in range(1000):
        for pages in (16, 128):
            choice = rng.randrange(len(backends[0][2]))
            for name, backend, paths in backends:
                path = paths[choice][:pages]
                begin = time.perf_counter()
                assert backend.exists(path) == pages
                middle = time.perf_counter()
                assert backend.get(path) == pages
                end = time.perf_counter()
                times.setdefault(("batch_exists", pages, name), []).append(middle - begin)
                times.setdefault(("batch_get", pages, name), []).append(end - middle)
    rows = []
    for call, pages in itertools.product(("batch_exists", "batch_get"), (16, 128)):
        row: dict[str, Any] = {"call": call, "pages": pages, "on_disk": len(backends[0][2]) * 128}
        for name in ("file", "canopy"):
            ordered = sorted(times[call, pages, name])
            row[f"{name}_p50_us"] = round(1e6 * ordered[len(ordered) // 2])
            row[f"{name}_p99_us"] = round(1e6 * ordered[int(0.99 * len(ordered))])
        rows.append(row)
    for name, backend, _ in backends:
        backend.close()
        shutil.rmtree(folder / f"latency-{name}")
    return rows


def _memory(options: argparse.Namespace, _folder: Path) -> dict[str, Any]:
    """Resident bytes a page on disk, each backend in a fresh process of its own."""
    found = {}
    for name in ("file", "canopy"):
        command = [sys.executable, __file__, f"memory-{name}", "--pages", str(options.pages)]
        if options.folder:
            command += ["--folder", str(options.folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[f"{name}_bytes_a_page"] = json.loads(done.stdout)
    return found


def resident(options: argparse.Namespace, folder: Path) -> int:
    from store_backends import CanopyBackend, FileBackend

    pool = _small_pool()
    capacity = 2 * options.pages * _page_bytes(pool)
    if options.question == "memory-file":
        backend: Any = FileBackend(pool, folder, capacity)
    else:
        backend = CanopyBackend(pool, folder, capacity)
    warm = list(itertools.islice(_keys("warm"), 128))
    for _ in range(3):
        backend.note(warm, _metas(128), None)
        backend.set(warm)
        backend.get(warm)
    gc.collect()
    before = _resident()
    _filled(options, lambda: backend, keep=False)
    gc.collect()
    return round((_resident() - before) / (options.pages // 128 * 128))


# ---- the sweeper ----


def sweeper(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the sweeper thread's cost for the process, with ``--pages`` pages on disk.

    Four rounds each without and with it, in turns, of a busy Python thread (the scheduler's
    stand-in); uses of 20 paths of 128 pages arrive every second, and pages expire all along.
    """
    from store_backends import CanopyBackend

    pool = _small_pool()
    capacity = 2 * options.pages * _page_bytes(pool)
    place = folder / "sweeper"
    place.mkdir()
    backend, paths = _filled(
        options, lambda: CanopyBackend(pool, place, capacity, "wa", ttl=30.0, sweep_s=1.0)
    )
    storage = backend.storage
    storage.sweeper.stop()
    storage.sweeper.cpu_s = 0.0
    rounds: dict[bool, list[int]] = {False: [], True: []}
    wall = 0.0
    turn = itertools.count()
    for i in range(8):
        sweeping = i % 2 == 1
        if sweeping:
            storage.sweeper.start()
            begin = time.perf_counter()
        rounds[sweeping].append(_busy(8.0, lambda: _tell(backend, paths, turn)))
        if sweeping:
            storage.sweeper.stop()
            wall += time.perf_counter() - begin
    result = {
        "pages": len(storage.store),
        "expired": storage.store.counters.evicted["ttl"],
        "sweeper_cpu_share": round(storage.sweeper.cpu_s / wall, 5),
        "busy_loops_without": sorted(rounds[False]),
        "busy_loops_with": sorted(rounds[True]),
        "slowdown": round(1 - sum(rounds[True]) / sum(rounds[False]), 4),
    }
    backend.close()
    return result


def _busy(seconds: float, every_second: Callable[[], None]) -> int:
    """Loops of plain Python work done in ``seconds``."""
    loops, end, tick = 0, time.perf_counter() + seconds, time.perf_counter()
    while (now := time.perf_counter()) < end:
        sum(range(1000))
        loops += 1
        if now >= tick:
            every_second()
            tick += 1.0
    return loops


def _tell(backend: Any, paths: list[list[str]], turn: Iterator[int]) -> None:
    for _ in range(20):
        path = paths[next(turn) * 7 % len(paths)]
        backend.used(path, _metas(1)[0])


# ---- helpers ----


def _small_pool() -> Any:
    from support.store_pool import host_pool

    return host_pool(128, page_tokens=4, layers=8, heads=2, head_dim=16)


def _page_bytes(pool: Any) -> int:
    return pool.page_size * pool.get_size_per_token()


def _keys(name: str) -> Iterator[str]:
    import hashlib

    return (hashlib.sha256(f"{name}{i}".encode()).hexdigest() for i in itertools.count())


def _metas(count: int) -> list[Any]:
    from sglang_canopy.disk.page import PageMeta

    now = time.time()
    return [
        PageMeta(
            64 * i, 64, category="chat", conversation="c", created=now, last_access=now, hits=1
        )
        for i in range(count)
    ]


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _bytes_below(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


_ANSWERS: dict[str, Callable[[argparse.Namespace, Path], Any]] = {
    "speed": speed,
    "sweeper": sweeper,
    "memory-file": resident,
    "memory-canopy": resident,
}

if __name__ == "__main__":
    main()
