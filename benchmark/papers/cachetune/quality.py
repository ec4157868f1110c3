"""Every selector of Figures 7, 9 and 10 on real questions, behind BOS and behind nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from cachetune import pictures
from cachetune.arms import QUALITY_ARMS
from cachetune.measure import compare_arms
from cachetune.questions import read_questions
from comparators.quality import mean_and_error

from question import Question, QuestionRun

QUESTION_COUNT = 20
Rows = dict[str, dict[str, Any]]


def run_quality(run: QuestionRun, data_set: str) -> dict[str, Any]:
    """Run the arms on the data set's questions."""
    examples = read_questions(run.data_folder, data_set, QUESTION_COUNT)
    rows = by_arm([compare_arms(example, QUALITY_ARMS) for example in examples])
    pictures.draw_selectors(run.figure_path(), rows, data_set)
    settings = {"questions": len(examples), "documents": 6, "chunk_tokens": 160, "threads": 1}
    return {**settings, "data": data_set, "arms": rows}


def by_arm(questions: Sequence[Rows]) -> Rows:
    """Return a row per arm: the mean KL with its standard error and its values; means of top1, run and CPU
    seconds; and the speed-up, full recompute's CPU seconds over the arm's."""
    rows_by_arm: Rows = {}
    full_cpu_s = sum(question["full"]["cpu_s"] for question in questions)
    for name in questions[0]:
        rows = [question[name] for question in questions]
        row: dict[str, Any] = {}
        kl_by_question = [r["kl"] for r in rows]
        row["kl"], row["kl_se"] = (round(x, 4) for x in mean_and_error(kl_by_question))
        row["kl_by_question"] = [round(v, 4) for v in kl_by_question]
        for field in ("top1", "run", "cpu_s"):
            row[field] = round(mean_and_error([r[field] for r in rows])[0], 4)
        row["speedup"] = round(full_cpu_s / sum(r["cpu_s"] for r in rows), 2)
        rows_by_arm[name] = row
    return rows_by_arm


QUESTIONS = tuple(
    Question(
        f"figures-3-7-9-10-{data_set}",
        f"KL by selector and ratio against CPU seconds, on {data_set}",
        partial(run_quality, data_set=data_set),
        20,
    )
    for data_set in ("musique", "hotpotqa")
)
