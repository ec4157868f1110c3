"""Figures 3, 7, 9 and 10: every selector on real questions, behind BOS and behind nothing."""

from __future__ import annotations

from typing import Any

from artefact import Context

from cachetune import pictures
from cachetune.arms import QUALITY, WATCHED
from cachetune.measure import compare
from cachetune.parts import each
from cachetune.questions import questions
from cachetune.summary import by_arm

QUESTIONS = 20


def run(context: Context, data: str) -> dict[str, Any]:
    """Run the arms on the data set's questions."""
    examples = questions(context.data, data, QUESTIONS)
    found = each(context, examples, lambda one: compare(one, QUALITY, watched=WATCHED))
    rows = by_arm(found)
    pictures.selectors(context.figure(), rows, data)
    pictures.trade_off(context.figure("-ratio"), rows, data)
    if data == "musique":
        pictures.heat_maps(context.figure("-attention"), found[0])
    settings = {"questions": len(examples), "documents": 6, "chunk_tokens": 160, "threads": 1}
    return {**settings, "data": data, "arms": rows}
