"""Synthetic traces in the Bailian format, made to published statistics.

Always labelled: the format has no room for a remark, so ``write_trace`` adds a
``NAME.meta.json`` with ``"synthetic": true`` to every trace.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from writing import open_for_writing

from canopy_lab.trace.record import TraceRequest
from sglang_canopy import __version__
from sglang_canopy.errors import CanopyError
from synthetic.api import ApiSource
from synthetic.chat import ChatSource
from synthetic.presets import BLOCK_TOKENS, ApiLoad, ChatLoad, Preset

_COMPRESSION_SUFFIXES = (".gz", ".xz")


SOURCE_BY_LOAD: dict[type, type] = {ChatLoad: ChatSource, ApiLoad: ApiSource}
"""Class of a preset's load -> the class that draws its requests."""


class SyntheticRequest(NamedTuple):
    """A request with the two ids of the Bailian format."""

    request: TraceRequest
    """``user`` is set, though the format does not carry it."""
    chat_id: int
    parent_chat_id: int
    """-1 for a first turn."""


def check_seconds(seconds: float) -> None:
    """Raises ``CanopyError`` unless ``seconds`` is the length of a trace."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise CanopyError(f"the length of the trace must be above 0 seconds, got {seconds}")


def synthesise(preset: Preset, seconds: float, seed: int) -> Iterator[SyntheticRequest]:
    """Draw the requests of ``seconds`` s in order of time; equal arguments, equal requests.

    Memory is that of the running conversations. Raises ``CanopyError``.
    """
    check_seconds(seconds)
    return _synthesise(preset, seconds, seed)


def _synthesise(preset: Preset, seconds: float, seed: int) -> Iterator[SyntheticRequest]:
    rng = Random(f"{preset.name}/{seed}")
    source = SOURCE_BY_LOAD[type(preset.load)]
    open_chats: dict[int, int] = {}  # conversation -> chat_id of its last turn
    requests = source(preset.load, seconds, rng, itertools.count())
    for chat_id, r in enumerate(requests):
        parent_id = open_chats.pop(r.conversation, -1)
        if r.has_next:
            open_chats[r.conversation] = chat_id
        request = TraceRequest(
            round(r.time_s, 3), r.input_tokens, r.output_tokens, r.blocks, BLOCK_TOKENS,
            category=r.category, turn=r.turn, conversation=str(r.conversation),
            user=str(r.user), line=chat_id + 1,
        )  # fmt: skip
        yield SyntheticRequest(request, chat_id, parent_id)


def to_bailian(synthetic: SyntheticRequest) -> str:
    """Return a request as a line of the Bailian format, without a line break."""
    r = synthetic.request
    return json.dumps(
        {
            "chat_id": synthetic.chat_id,
            "parent_chat_id": synthetic.parent_chat_id,
            "timestamp": r.time_s,
            "input_length": r.input_tokens,
            "output_length": r.output_tokens,
            "type": r.category,
            "turn": r.turn,
            "hash_ids": r.blocks,
        },
        separators=(",", ":"),
    )


def meta_path(path: Path) -> Path:
    """Return the label file of the trace at ``path``: ``NAME.meta.json`` in the same folder."""
    name = path.name
    for suffix in _COMPRESSION_SUFFIXES:
        name = name.removesuffix(suffix)
    return path.with_name(name.removesuffix(".jsonl") + ".meta.json")


def write_trace(path: Path, preset: Preset, seconds: float, seed: int) -> dict[str, Any]:
    """Write a synthetic trace and its label; returns the label.

    ``path`` may end in ``.gz`` or ``.xz``. Raises ``CanopyError`` when a file cannot be written.
    """
    request_count = input_tokens = 0
    with open_for_writing(path) as out:
        for synthetic in synthesise(preset, seconds, seed):
            out.write(to_bailian(synthetic) + "\n")
            request_count += 1
            input_tokens += synthetic.request.input_tokens
    meta = {
        "synthetic": True,
        "note": "Made by benchmark/traces/make_synthetic.py. No request in it was ever sent by anybody.",
        "format": "bailian",
        "preset": preset.name,
        "about": preset.description,
        "calibrated_to": "arXiv 2506.02634 (USENIX ATC 2025), see docs/research/planner.md"
        if preset.name.startswith("trace-")
        else None,
        "requests_per_s": preset.load.requests_per_s,
        "seconds": seconds,
        "seed": seed,
        "block_tokens": BLOCK_TOKENS,
        "requests": request_count,
        "input_tokens": input_tokens,
        "canopy_version": __version__,
    }
    try:
        meta_path(path).write_text(json.dumps(meta, indent=2) + "\n")
    except OSError as error:
        raise CanopyError(f"cannot write {str(meta_path(path))!r}: {error}") from None
    return meta
