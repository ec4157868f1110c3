"""Every selector of Figures 7, 9 and 10 on real questions, behind BOS and behind nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from cachetune import pictures
from cachetune.arms import QUALITY_ARMS
from cachetune.measure import CHUNK_TOKENS, compare_arms
from cachetune.questions import DOCUMENT_COUNT, read_questions
from comparators.quality import mean_and_error

from question import Question, QuestionRun

QUESTION_COUNT = 20
RowsByArm = dict[str, dict[str, Any]]


def run_quality(run: QuestionRun, data_set: str) -> dict[str, Any]:
    """Run the arms on the data set's questions."""
    examples = read_questions(run.data_folder, data_set, QUESTION_COUNT)
    rows = mean_by_arm([compare_arms(example, QUALITY_ARMS) for example in examples])
    pictures.draw_selectors(run.figure_path(), rows, data_set)
    settings = {"documents": DOCUMENT_COUNT, "chunk_tokens": CHUNK_TOKENS, "threads": 1}
    return {"questions": len(examples), **settings, "data": data_set, "arms": rows}


def mean_by_arm(rows_by_question: Sequence[RowsByArm]) -> RowsByArm:
    """Return a row per arm: the mean KL with its standard error and its values; means of top1, run and CPU
    seconds; and the speed-up, full recompute's CPU seconds over the arm's."""
    mean_rows: RowsByArm = {}
    full_cpu_s = sum(question["full"]["cpu_s"] for question in rows_by_question)
    for name in rows_by_question[0]:
        rows = [question[name] for question in rows_by_question]
        row: dict[str, Any] = {}
        kl_by_question = [r["kl"] for r in rows]
        row["kl"], row["kl_se"] = (round(value, 4) for value in mean_and_error(kl_by_question))
        row["kl_by_question"] = [round(kl, 4) for kl in kl_by_question]
        for field in ("top1", "run", "cpu_s"):
            row[field] = round(mean_and_error([r[field] for r in rows])[0], 4)
        row["speedup"] = round(full_cpu_s / sum(r["cpu_s"] for r in rows), 2)
        mean_rows[name] = row
    return mean_rows


QUESTIONS = tuple(
    Question(
        f"figures-3-7-9-10-{data_set}",
        f"KL by selector and ratio against CPU seconds, on {data_set}",
        partial(run_quality, data_set=data_set),
        cpu_minutes=20,
    )
    for data_set in ("musique", "hotpotqa")
)
