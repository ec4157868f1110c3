"""Replay a trace against a storage backend and count the tokens that it hits."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from store_backends import Backend

from canopy_lab.sim.requests import to_requests
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.disk.page import PageMeta
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from overlays import overlay
from synthetic.presets import get_preset
from synthetic.trace import synthesise


@dataclass
class Replay:
    """Result of replaying a trace against a backend."""

    requests: int = 0
    tokens: int = 0
    """Tokens of all prompts."""
    front_tokens: int = 0
    """Tokens found in the tier above, if there is one."""
    disk_tokens: int = 0
    """Read from disk."""
    wrong_pages: int = 0
    pages_written: int = 0


def trace_b(seconds: float, rate: float, seed: int) -> Iterator[TraceRequest]:
    """The synthetic preset ``trace-b`` (blocks of 16 tokens)."""
    preset = get_preset("trace-b").at_rate(rate)
    return (drawn.request for drawn in synthesise(preset, seconds, seed))


def agentic(
    archive: Path, conversations: int, window_s: float, seed: int
) -> Iterator[TraceRequest]:
    """An overlay of agentic conversations, as long as new ones start (then load fades)."""
    return (r for r in overlay(archive, conversations, window_s, seed) if r.time_s <= window_s)


def key_of(block: int) -> str:
    """A page's key: that of its last block, whose id stands for the whole prefix."""
    return hashlib.sha256(b"%d" % block).hexdigest()


def pages_of(record: TraceRequest | Request, group: int) -> list[int]:
    """Return the last block of each full page of a prompt, with ``group`` blocks per page."""
    blocks = record.blocks if isinstance(record, TraceRequest) else record.path
    tokens = record.input_tokens if isinstance(record, TraceRequest) else record.prompt_tokens
    full = min(tokens // record.block_tokens, len(blocks)) // group
    return [blocks[(i + 1) * group - 1] for i in range(full)]


def distinct_pages(trace: Iterable[TraceRequest], group: int) -> int:
    seen: set[int] = set()
    for record in trace:
        seen.update(pages_of(record, group))
    return len(seen)


def replay(
    backend: Backend,
    trace: Iterable[TraceRequest],
    group: int,
    *,
    labels: str = "wa",
    front_blocks: int = 0,
) -> Replay:
    """Serve ``trace`` as HiCache does: match, read cached pages, write the others.

    ``labels``: the device's policy, which categorises the pages as in a server.
    ``front_blocks``: capacity of a tier above (an LRU tree); its blocks are not read from disk.
    """
    done, device = Replay(), make_policy(labels)
    hits: dict[str, int] = {}
    front: RadixTree | None = None
    for request in to_requests(trace):
        page_tokens = group * request.block_tokens
        keys = [key_of(block) for block in pages_of(request, group)]
        request.label = device.arrive(request)
        backend.at_time(request.time)
        announced = dataclasses.replace(request, label=None)
        start = 0
        if front_blocks:
            front = front or RadixTree(make_policy("lru"), front_blocks, request.block_tokens)
            start = min(front.access(request) // group, len(keys))
        asked = keys[start:]
        got = _read(backend, asked, backend.exists(asked) if asked else 0, done)
        _write(backend, keys, start + got, request, page_tokens, done)
        request.label = device.finish(request)
        backend.say("arrive", announced)
        backend.say("finish", dataclasses.replace(announced))
        for run, uses in _runs(keys, hits):
            backend.used(run, _meta(request, 0, page_tokens, uses))
        done.requests += 1
        done.tokens += request.prompt_tokens
        done.front_tokens += start * page_tokens
        done.disk_tokens += got * page_tokens
    return done


def _runs(keys: list[str], hits: dict[str, int]) -> Iterator[tuple[list[str], int]]:
    """Count a use of each page. Yield runs of pages with equal counts, which form a tree node."""
    for key in keys:
        hits[key] = hits.get(key, 0) + 1
    for uses, run in itertools.groupby(keys, hits.__getitem__):
        yield list(run), uses


def _read(backend: Backend, keys: list[str], there: int, done: Replay) -> int:
    read = 0
    for first in range(0, there, backend.batch):
        batch = keys[first : min(there, first + backend.batch)]
        got = backend.get(batch)
        done.wrong_pages += sum(not backend.is_page(i, batch[i]) for i in range(got))
        read += got
        if got < len(batch):
            break
    return read


def _write(
    backend: Backend, keys: list[str], first: int, request: Request, page_tokens: int, done: Replay
) -> None:
    for begin in range(first, len(keys), backend.batch):
        batch = keys[begin : begin + backend.batch]
        for place, key in enumerate(batch):
            backend.stamp(place, key)
        metas = [_meta(request, (begin + i) * page_tokens, page_tokens) for i in range(len(batch))]
        backend.note(batch, metas, keys[begin - 1] if begin else None)
        backend.set(batch)
        done.pages_written += len(batch)


def _meta(request: Request, offset: int, tokens: int, hits: int = 1) -> PageMeta:
    conversation = request.conversation
    return PageMeta(
        offset=offset,
        length=tokens,
        category=request.label or request.category,
        turn=request.turn,
        conversation=None if conversation is None else str(conversation),
        created=request.time,
        last_access=request.time,
        hits=hits,
        history=request.prompt_tokens + request.output_tokens,
    )
