"""Quality lost and time saved by reusing documents, for every selector and encoding, on a model.

python benchmark/chunk/chunk_eval.py --model DIR --data questions.json --ratio 0,0.15
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", required=True, help="Hugging Face directory (Llama, Qwen2, Mistral)"
    )
    parser.add_argument("--data", help="questions: MuSiQue- or HotpotQA-style JSON, or JSON lines")
    parser.add_argument(
        "--tasks",
        default="",
        help="synthetic tasks as well, of single,split,coreference (the default without --data)",
    )
    parser.add_argument(
        "--task-count", type=int, default=20, help="examples of each synthetic task"
    )
    parser.add_argument("--selector", default="question", help="names, comma-separated; or 'all'")
    parser.add_argument(
        "--ratio", default="0.15", help="shares recomputed, comma-separated; 0 = none"
    )
    parser.add_argument(
        "--encode",
        default="prefix",
        help=f"what chunks are encoded behind: {', '.join(ENCODINGS)}, comma-separated",
    )
    parser.add_argument("--limit", type=int, help="only the first N questions")
    parser.add_argument("--chunks", type=int, default=6, help="most documents per prompt")
    parser.add_argument("--chunk-tokens", type=int, default=160, help="most tokens per document")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="type of the weights and KV",
    )
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and the random selector")
    parser.add_argument("--json", type=Path, help="write the rows here, after every example")
    parser.add_argument(
        "--answer-tokens", type=int, default=16, help="most tokens of an answer (F1, ROUGE-L, kept)"
    )
    parser.add_argument("--no-text", action="store_true", help="skip generation: KL and top-1 only")
    parser.add_argument("--per-example", action="store_true", help="every example in the JSON too")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run whose --json this is; keeps every example in it",
    )
    parser.add_argument("--minutes", type=float, help="begin no example after so many minutes")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print a table. The rows are the table's, with more columns."""
    plan = EvaluationPlan(
        model=args.model,
        data=args.data,
        tasks=_names(args.tasks) or (() if args.data else ("single", "split", "coreference")),
        task_count=_positive(args.task_count, "--task-count"),
        selectors=_names(args.selector),
        ratios=_ratios(args.ratio),
        encodings=_encodings(args.encode),
        limit=None if args.limit is None else _positive(args.limit, "--limit"),
        chunks=_positive(args.chunks, "--chunks"),
        chunk_tokens=_positive(args.chunk_tokens, "--chunk-tokens"),
        dtype=args.dtype,
        device=args.device,
        seed=args.seed,
        text=not args.no_text,
        answer_tokens=_positive(args.answer_tokens, "--answer-tokens"),
    )
    if args.json and not args.json.resolve().parent.is_dir():
        raise CanopyError(f"--json {args.json}: its folder does not exist; make it first")

    if args.resume and not args.json:
        raise CanopyError("--resume needs --json, the file of the run to resume")
    if args.minutes is not None and args.minutes <= 0:
        raise CanopyError(f"--minutes {args.minutes:g}: give a number above 0")
    earlier = None
    if args.resume and args.json.exists():
        earlier = json.loads(args.json.read_text())

    def save(report: dict[str, Any]) -> None:
        """Save after every example, so that an interrupted run keeps its measurements."""
        if args.json:
            kept = {
                k: v
                for k, v in report.items()
                if args.per_example or args.resume or k != "examples"
            }
            replace_file(args.json, json.dumps(kept, indent=1) + "\n")

    bound = {} if args.minutes is None else {"seconds": 60 * args.minutes}
    report = evaluate(plan, sys.stderr.isatty(), save, earlier, **bound)
    print_table(report["rows"])
    return 0


def print_table(rows: list[dict[str, Any]]) -> None:
    """Return the rows as aligned text."""
    names = ("selector", "encode", "ratio", "n", "kl", "kl_se", "top1", "retained")
    names += ("ttft_s", "ttft_full_s")
    print(text_table(names, [[_cell(row[name]) for name in names] for row in rows]))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _names(text: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in text.split(",") if n.strip())


def _positive(value: int, flag: str) -> int:
    if value < 1:
        raise CanopyError(f"{flag} {value}: give a whole number of at least 1")
    return value


def _ratios(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(r) for r in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= r <= 1 for r in found):
        raise CanopyError(f"--ratio {text}: give numbers from 0 to 1, comma-separated")
    return found


def _encodings(text: str) -> tuple[str, ...]:
    found = _names(text)
    if not found or any(e not in ENCODINGS for e in found):
        raise CanopyError(f"--encode {text}: allowed are {', '.join(ENCODINGS)}, comma-separated")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except CanopyError as error:
        print(f"chunk_eval: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
