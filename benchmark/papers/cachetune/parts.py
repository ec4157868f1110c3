"""Resumable work, question by question.

Nothing is kept from an earlier run unless ``CANOPY_PAPERS_RESUME`` names a folder for it; delete the
folder to measure again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from artefact import Context

One = TypeVar("One")


def each(context: Context, items: Sequence[One], work: Callable[[One], Any]) -> list[Any]:
    """Return ``work`` of every item after a JSON round trip, so that a resumed run gives equal results."""
    kept = os.environ.get("CANOPY_PAPERS_RESUME")
    folder = Path(kept) / context.paper / context.key if kept else None
    found = []
    for i, item in enumerate(items):
        path = folder / f"{i}.json" if folder else None
        if path is not None and path.exists():
            found.append(json.loads(path.read_text(encoding="utf-8")))
            continue
        found.append(json.loads(json.dumps(work(item))))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found[-1]), encoding="utf-8")
    return found
