"""Quality lost and time saved by reusing documents, for every selector and encoding, on a model.

python benchmark/documents/quality.py --model DIR --data questions.json --ratio 0,0.15
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from comparators.evaluate import EvaluationPlan, evaluate
from comparators.quality import ENCODINGS

from canopy_lab.report.table import text_table
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file

COUNT_ARGS = ("task_count", "limit", "chunks", "chunk_tokens", "answer_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face directory (Llama, Qwen2, Mistral)")
    add("--data", help="questions: MuSiQue- or HotpotQA-style JSON, or JSON lines")
    tasks_help = "synthetic tasks as well, of single,split,coreference (the default without --data)"
    add("--tasks", default="", help=tasks_help)
    add("--task-count", type=int, default=20, help="examples of each synthetic task")
    add("--selector", default="question", help="names, comma-separated; or 'all'")
    add("--ratio", default="0.15", help="shares recomputed, comma-separated; 0 = none")
    encode_help = f"what chunks are encoded behind: {', '.join(ENCODINGS)}, comma-separated"
    add("--encode", default="prefix", help=encode_help)
    add("--limit", type=int, help="only the first N questions")
    add("--chunks", type=int, default=6, help="most documents per prompt")
    add("--chunk-tokens", type=int, default=160, help="most tokens per document")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--device", default="cpu", help="torch device")
    add("--seed", type=int, default=0, help="seed of tasks and the random selector")
    add("--json", type=Path, help="write the rows here, after every example")
    answer_help = "most tokens of an answer (F1, ROUGE-L, kept)"
    add("--answer-tokens", type=int, default=16, help=answer_help)
    add("--no-text", action="store_true", help="skip generation: KL and top-1 only")


def run_evaluation(args: argparse.Namespace) -> int:
    """Evaluate, print a table, and write its rows with more columns to ``--json``."""
    for name in COUNT_ARGS:
        count = getattr(args, name)
        if count is not None and count < 1:
            flag = name.replace("_", "-")
            raise CanopyError(f"--{flag} {count}: give a whole number of at least 1")
    if args.json and not args.json.resolve().parent.is_dir():
        raise CanopyError(f"--json {args.json}: its folder does not exist; make it first")
    plan = EvaluationPlan(
        tasks=_split_names(args.tasks) or (() if args.data else ("single", "split", "coreference")),
        selectors=_split_names(args.selector),
        ratios=_parse_ratios(args.ratio),
        encodings=_parse_encodings(args.encode),
        text=not args.no_text,
        **{n: getattr(args, n) for n in (*COUNT_ARGS, "model", "data", "dtype", "device", "seed")},
    )

    def save(report: dict[str, Any]) -> None:
        """Save after every example, so that an interrupted run keeps its measurements."""
        if args.json:
            table = {k: v for k, v in report.items() if k != "examples"}
            replace_file(args.json, json.dumps(table, indent=1) + "\n")

    report = evaluate(plan, sys.stderr.isatty(), save)
    print_table(report["rows"])
    return 0


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows as aligned text."""
    columns = ("selector", "encode", "ratio", "n", "kl", "kl_se", "top1", "retained")
    columns += ("ttft_s", "ttft_full_s")
    print(text_table(columns, [[_cell(row[name]) for name in columns] for row in rows]))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in text.split(",") if n.strip())


def _parse_ratios(text: str) -> tuple[float, ...]:
    try:
        ratios = tuple(float(r) for r in text.split(","))
    except ValueError:
        ratios = ()
    if not ratios or not all(0 <= r <= 1 for r in ratios):
        raise CanopyError(f"--ratio {text}: give numbers from 0 to 1, comma-separated")
    return ratios


def _parse_encodings(text: str) -> tuple[str, ...]:
    encodings = _split_names(text)
    if not encodings or any(e not in ENCODINGS for e in encodings):
        raise CanopyError(f"--encode {text}: allowed are {', '.join(ENCODINGS)}, comma-separated")
    return encodings


def main(argv: list[str] | None = None) -> int:
    raw_text = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw_text)
    add_arguments(parser)
    try:
        return run_evaluation(parser.parse_args(argv))
    except CanopyError as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
