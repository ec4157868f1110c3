"""Figures 3, 7, 9 and 10: every selector on real questions, behind BOS and behind nothing."""

from __future__ import annotations

from typing import Any

from artefact import Context

from cachetune import pictures
from cachetune.arms import CORE, QUALITY, WATCHED
from cachetune.measure import compare
from cachetune.parts import each
from cachetune.questions import questions
from cachetune.summary import by_arm
from canopy_chunks.tasks import Example

QUESTIONS = 11
ALL_ARMS = 6
"""Questions that every arm is run on; the others have those of ``CORE``."""


def run(context: Context, data: str) -> dict[str, Any]:
    """The arms on the data set's questions."""
    examples = questions(context.data, data, QUESTIONS)
    found = each(context, list(enumerate(examples)), lambda one: _one(*one))
    rows = by_arm(found)
    same = by_arm(found[:ALL_ARMS])  # pictures compare arms on the same questions
    pictures.selectors(context.figure(), same, data)
    pictures.trade_off(context.figure("-ratio"), same, data)
    if data == "musique":
        pictures.heat_maps(context.figure("-attention"), found[0])
    settings = {"questions": len(examples), "documents": 6, "chunk_tokens": 160, "threads": 1}
    return {**settings, "data": data, "arms": rows}


def _one(number: int, example: Example) -> dict[str, Any]:
    if number < ALL_ARMS:
        return compare(example, QUALITY, watched=WATCHED)
    return compare(example, CORE)
