"""Kill a busy store at a random instant, open its folder, and check every page."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from sglang_canopy.disk.content import raw_key
from support.crash_writer import open_store
from support.disk_pages import PAGE_BYTES, content
from support.disk_recount import recount

TESTS = Path(__file__).parents[1]


@dataclass
class CrashCounts:
    """Sums over kills."""

    kills: int = 0
    start_failures: int = 0
    """Stores that did not open afterwards (or opened unavailable)."""
    wrong_pages: int = 0
    """Pages served with wrong bytes. Must be 0."""
    stored_pages: int = 0
    """Pages on record after the kills."""
    lost_pages: int = 0
    """Acknowledged pages without bytes: dropped, not served."""
    acknowledged_pages: int = 0
    """Pages of the last acknowledged batch before each kill, which were not evicted yet."""
    surviving_pages: int = 0
    """Acknowledged pages that were correct afterwards."""
    written_pages: int = 0
    """Pages in acknowledged batches, present ones included."""
    orphan_pages: int = 0
    problems: list[str] = field(default_factory=list)


def kill_once(folder: Path, seed: int, counts: CrashCounts) -> None:
    """Start the writer on the folder, kill it, check every page."""
    rng = random.Random(seed)
    writer = subprocess.Popen(
        [sys.executable, "-m", "support.crash_writer", str(folder), str(seed)],
        stdout=subprocess.PIPE,
        cwd=TESTS,
    )
    assert writer.stdout is not None
    descriptor, output = writer.stdout.fileno(), b""
    os.set_blocking(descriptor, False)
    kill_time = None
    while kill_time is None or time.monotonic() < kill_time:
        select.select([descriptor], [], [], 0.01)
        output += _read_available(descriptor)
        # The writer is running: wait some milliseconds before the kill.
        if kill_time is None and output:
            kill_time = time.monotonic() + rng.uniform(0.0, 0.25)
        if writer.poll() is not None:
            break
    was_running = writer.poll() is None
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    output += _read_available(descriptor)
    writer.stdout.close()
    counts.kills += 1
    if not was_running:
        counts.start_failures += 1
        counts.problems.append(f"the writer ended by itself (seed {seed})")
        return
    check_store(folder, output.decode().splitlines(), counts)


def check_store(folder: Path, writer_lines: list[str], counts: CrashCounts) -> None:
    """Open the store and compare every page with its recomputation."""
    wrong_lines = [line for line in writer_lines if line.startswith("WRONG")]
    counts.wrong_pages += len(wrong_lines)
    counts.problems.extend(wrong_lines)
    batches = [line.split() for line in writer_lines if line and line[0].isdigit()]
    # The kill may cut the last line short.
    batches = [words for words in batches if words[1:] and all(len(key) == 64 for key in words[1:])]
    counts.written_pages += sum(int(page_count) for page_count, *_ in batches)
    store = open_store(folder)
    if store.unavailable is not None:
        counts.start_failures += 1
        counts.problems.append(store.unavailable)
        return
    counts.orphan_pages += store.counters.orphan_units
    key_by_raw = {raw_key(key): key for _, *keys in batches for key in keys}
    key_by_raw.update((raw, raw.hex()) for raw in store.state.index.row_of)
    counts.stored_pages += len(store)
    correct_keys: set[str] = set()
    while True:  # a bad page invalidates its suffix: read each path from its root
        leaf_keys = [
            raw
            for raw, row in store.state.index.row_of.items()
            if not store.state.index.children[row]
        ]
        unread_leaf_keys = [raw for raw in leaf_keys if key_by_raw[raw] not in correct_keys]
        if not unread_leaf_keys:
            break
        keys = _path_keys(store, unread_leaf_keys[0], key_by_raw)
        buffers = [bytearray(PAGE_BYTES) for _ in keys]
        for key, buffer, readable in zip(keys, buffers, store.read(keys, buffers), strict=True):
            if readable and bytes(buffer) != content(key):
                counts.wrong_pages += 1
                counts.problems.append(f"wrong bytes for {key}")
            if readable:
                correct_keys.add(key)
    counts.lost_pages += store.counters.faults["corrupt"]
    if batches:
        last_batch = batches[-1]
        stored_keys = last_batch[1 : 1 + int(last_batch[0])]
        counts.acknowledged_pages += len(stored_keys)
        counts.surviving_pages += sum(key in correct_keys for key in stored_keys)
    recount(store)
    store.close()


def _path_keys(store, raw: bytes, key_by_raw: dict[bytes, str]) -> list[str]:
    row, keys = store.state.index.row_of[raw], []
    while row >= 0:
        keys.append(key_by_raw[store.state.index.key_of[row]])
        row = store.state.index.parent[row]
    return keys[::-1]


def _read_available(descriptor: int) -> bytes:
    parts = []
    while True:
        try:
            new_output = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            break
        if not new_output:
            break
        parts.append(new_output)
    return b"".join(parts)
