"""Every selector of Figures 7, 9 and 10 on real questions, behind BOS and behind nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from cachetune import pictures
from cachetune.arms import QUALITY
from cachetune.measure import compare
from cachetune.questions import questions
from comparators.quality import mean_and_error

from question import Question, RunContext

COUNT = 20
Rows = dict[str, dict[str, Any]]


def run(context: RunContext, data: str) -> dict[str, Any]:
    """Run the arms on the data set's questions."""
    examples = questions(context.data, data, COUNT)
    rows = by_arm([compare(one, QUALITY) for one in examples])
    pictures.selectors(context.figure(), rows, data)
    settings = {"questions": len(examples), "documents": 6, "chunk_tokens": 160, "threads": 1}
    return {**settings, "data": data, "arms": rows}


def by_arm(questions: Sequence[Rows]) -> Rows:
    """Return a row per arm: the mean KL with its standard error and its values; means of top1, run and CPU
    seconds; and the speed-up, full recompute's CPU seconds over the arm's."""
    by_name: Rows = {}
    full = sum(question["full"]["cpu_s"] for question in questions)
    for name in questions[0]:
        rows = [question[name] for question in questions]
        row: dict[str, Any] = {}
        values = [r["kl"] for r in rows]
        row["kl"], row["kl_se"] = (round(x, 4) for x in mean_and_error(values))
        row["kl_by_question"] = [round(v, 4) for v in values]
        for field in ("top1", "run", "cpu_s"):
            row[field] = round(mean_and_error([r[field] for r in rows])[0], 4)
        row["speedup"] = round(full / sum(r["cpu_s"] for r in rows), 2)
        by_name[name] = row
    return by_name


QUESTIONS = tuple(
    Question(
        f"figures-3-7-9-10-{data}",
        f"KL by selector and ratio against CPU seconds, on {data}",
        partial(run, data=data),
        20,
    )
    for data in ("musique", "hotpotqa")
)
