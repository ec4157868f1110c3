"""Figures 7, 9 and 10: every selector on real questions, and on made-up ones."""

from __future__ import annotations

from typing import Any

from artefact import Context

from cachetune import arms, pictures
from cachetune.measure import compare
from cachetune.parts import each
from cachetune.questions import questions
from cachetune.summary import by_arm

QUESTIONS = {"musique": 6, "hotpotqa": 7, "tasks": 3}


def run(context: Context, data: str) -> dict[str, Any]:
    """All arms on the data set's questions; fewer on made-up ones."""
    chosen = arms.TASKS if data == "tasks" else (*arms.ALONE, *arms.BEHIND, *arms.SWEEP)
    examples = questions(context.data, data, QUESTIONS[data])
    found = each(context, examples, lambda example: compare(example, chosen))
    rows = by_arm(found)
    pictures.selectors(context.figure(), rows, data)
    if data != "tasks":
        pictures.trade_off(context.figure("-ratio"), rows, data)
    settings = {"questions": len(examples), "documents": 6, "chunk_tokens": 160, "threads": 1}
    return {**settings, "data": data, "arms": rows}
