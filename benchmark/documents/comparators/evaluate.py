"""Evaluate every variant on every example for ``quality.py``, and aggregate the rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from canopy_documents.fuse.encode import Encoder
from canopy_documents.quality import tasks
from canopy_documents.quality.answers import Case, contains_answer, make_case
from comparators import SELECTORS, make_selector, questions
from comparators.quality import (
    FORCED_TOKENS,
    Reference,
    encode_case,
    f1,
    mean_and_error,
    measure,
    reference_of,
    rouge_l,
)
from comparators.weights import load
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """An evaluation; the fields are the command's options."""

    model: str
    data: str | None = None
    tasks: tuple[str, ...] = ()
    task_count: int = 20
    selectors: tuple[str, ...] = ("question",)
    ratios: tuple[float, ...] = (0.15,)
    encodings: tuple[str, ...] = ("prefix",)
    limit: int | None = None
    chunks: int = 6
    chunk_tokens: int = 160
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    text: bool = True
    answer_tokens: int = FORCED_TOKENS


def evaluate(
    plan: EvaluationPlan,
    show_progress: bool = False,
    on_example: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run a plan. Returns ``rows`` (one a selector, encoding and ratio), ``tasks`` (the same by
    task), ``examples`` (every measurement) and the plan. ``on_example`` gets the same after each
    example, so that a long run can be stopped.

    Row fields: selector, encode, ratio, n, kl (nats a token), kl_se, top1, retained (of the
    answers full recompute gets right, the share kept; None if it gets none), ttft_s, ttft_full_s,
    then the time split, F1 and ROUGE-L, and paired differences with standard errors:
    ``kl_minus_random`` where ``random`` was measured too, and ``kl_minus_encode`` to the same
    selector and ratio with the first encoding named.
    """
    names = tuple(SELECTORS) if plan.selectors == ("all",) else plan.selectors
    for name in names:
        make_selector(name)
    examples = questions.read_examples(plan.data, plan.limit) if plan.data else []
    filler = questions.filler_from(examples) if examples else tasks.default_filler()
    examples += tasks.make_examples(plan.tasks, plan.task_count, filler, plan.chunks, plan.seed)
    if not examples:
        raise CanopyError("nothing to evaluate: give --data, --tasks, or both")
    model = load(plan.model, getattr(torch, plan.dtype), plan.device)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plan.model)
    measurements: list[dict[str, Any]] = []
    encoders: dict[tuple[int, ...], Encoder] = {}  # the text before the documents is computed once
    for example in tqdm(examples, unit="example", disable=not show_progress):
        case = make_case(tokenizer, example, plan.chunks, plan.chunk_tokens)
        measurements += _measure_example(plan, names, model, tokenizer, case, encoders)
        if on_example is not None:
            on_example(_report(plan, names, measurements))
    return _report(plan, names, measurements)


def _report(
    plan: EvaluationPlan, names: tuple[str, ...], measurements: list[dict[str, Any]]
) -> dict[str, Any]:
    variants = list(itertools.product(plan.encodings, plan.ratios, names))
    first_encoding = plan.encodings[0]
    rows = [_make_row(measurements, variant, first_encoding) for variant in variants]
    by_task = [
        {"task": task, **_make_row(of_task, variant, first_encoding)}
        for task in dict.fromkeys(m["task"] for m in measurements)
        for of_task in [[m for m in measurements if m["task"] == task]]
        for variant in variants
    ]
    settings = {**asdict(plan), "threads": torch.get_num_threads()}
    return {"rows": rows, "tasks": by_task, "examples": measurements, "plan": settings}


def _measure_example(
    plan: EvaluationPlan,
    names: tuple[str, ...],
    model: Any,
    tokenizer: Any,
    case: Case,
    encoders: dict[tuple[int, ...], Encoder],
) -> list[dict[str, Any]]:
    """Run every variant on one example. Selectors differ only at ratios above 0 and below 1."""
    reference: Reference = reference_of(model, tokenizer, case, plan.answer_tokens)
    is_right = contains_answer(reference.text, case.answers)
    measurements = []
    for encoding in plan.encodings:
        chunks = encode_case(model, case, encoding, encoders)
        for ratio in plan.ratios:
            shared: dict[str, Any] | None = None
            for name in names:
                if shared is not None and ratio in (0.0, 1.0):
                    result = shared
                else:
                    text_too = plan.text and bool(case.answers)
                    arguments = (model, tokenizer, case, reference, chunks, name, ratio, text_too)
                    result = measure(*arguments, plan.answer_tokens)
                shared = result
                text = result["text"]
                measurements.append(
                    {
                        "selector": name,
                        "encode": encoding,
                        "ratio": ratio,
                        "task": case.task,
                        "tokens": len(case.token_ids),
                        "full_right": is_right,
                        "right": text is not None and contains_answer(text, case.answers),
                        "f1": f1(text, case.answers) if text is not None else None,
                        "rouge_l": rouge_l(text, case.answers) if text is not None else None,
                        "f1_full": f1(reference.text, case.answers),
                        "ttft_full_s": reference.ttft_s,
                        **result,
                    }
                )
    return measurements


def _make_row(
    measurements: list[dict[str, Any]], variant: tuple[str, float, str], first_encoding: str
) -> dict[str, Any]:
    """Return a row of the table; ``first_encoding``: the encoding that others are compared with."""
    encoding, ratio, selector = variant

    def examples_of(name: str, wanted: str = encoding) -> list[dict[str, Any]]:
        key = (name, wanted, ratio)
        return [m for m in measurements if (m["selector"], m["encode"], m["ratio"]) == key]

    examples = examples_of(selector)
    kl, kl_se = mean_and_error([m["kl"] for m in examples])
    full_right = [m for m in examples if m["full_right"] and m["text"] is not None]
    row: dict[str, Any] = {
        "selector": selector,
        "encode": encoding,
        "ratio": ratio,
        "n": len(examples),
        "kl": kl,
        "kl_se": kl_se,
        "top1": mean_and_error([m["top1"] for m in examples])[0],
        "retained": sum(m["right"] for m in full_right) / len(full_right) if full_right else None,
        "retained_n": len(full_right),
    }
    for name in ("ttft_s", "ttft_full_s", "tokens", "rows"):
        row[name] = mean_and_error([float(m[name]) for m in examples])[0]
    for name in ("f1", "f1_full", "rouge_l"):
        values = [m[name] for m in examples if m[name] is not None]
        row[name] = mean_and_error(values)[0] if values else None
    random_examples = examples_of("random")
    if random_examples and selector != "random":
        pairs = [a["kl"] - b["kl"] for a, b in zip(examples, random_examples)]
        row["kl_minus_random"], row["kl_minus_random_se"] = mean_and_error(pairs)
    if encoding != first_encoding:
        pairs = [a["kl"] - b["kl"] for a, b in zip(examples, examples_of(selector, first_encoding))]
        row["kl_minus_encode"], row["kl_minus_encode_se"] = mean_and_error(pairs)
    return row
