"""Figures 7, 9 and 10: every selector on real questions, behind BOS and behind nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

from cachetune import pictures
from cachetune.arms import QUALITY
from cachetune.measure import compare
from cachetune.questions import questions
from cachetune.summary import by_arm

from question import Context, Question

COUNT = 20


def run(context: Context, data: str) -> dict[str, Any]:
    """Run the arms on the data set's questions."""
    examples = questions(context.data, data, COUNT)
    rows = by_arm([compare(one, QUALITY) for one in examples])
    pictures.selectors(context.figure(), rows, data)
    settings = {"questions": len(examples), "documents": 6, "chunk_tokens": 160, "threads": 1}
    return {**settings, "data": data, "arms": rows}


QUESTIONS = tuple(
    Question(
        f"figures-3-7-9-10-{data}",
        f"KL by selector and ratio against CPU seconds, on {data}",
        partial(run, data=data),
        20,
    )
    for data in ("musique", "hotpotqa")
)
