"""Answer the questions of this folder again: figures and tables of the papers, claims of README.

    python benchmark/run.py --list
    python benchmark/run.py wa tail                    # all questions of two groups
    python benchmark/run.py kareto/figure-13 eviction/claims
    python benchmark/run.py --all --missing            # those without a result file

Every question runs in a process of its own, two at a time, and writes its KEY.json and KEY.md
(``question.py``). To resume a stopped run, delete the result files to remake and pass
``--missing``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDERS = [HERE, *(HERE / name for name in ("papers", "traces", "documents"))]
FOLDERS += [HERE.parent / name for name in ("scripts", "test")]
sys.path += [str(folder) for folder in FOLDERS]

from tqdm import tqdm  # noqa: E402

import result_file  # noqa: E402
from question import ROOT, Question, QuestionRun, find_data_folder, result_path  # noqa: E402

MODULES = {
    "wa": ("wa.predict",),
    "tail": ("tail.tables",),
    "cachetune": ("cachetune.quality", "cachetune.spectrum"),
    "kareto": ("kareto.search", "kareto.group_ttl"),
    "eviction": (
        *("eviction.claims", "eviction.hints"),
        *("eviction.victim_cost", "eviction.long_prompts"),
    ),
    "latency": ("latency.simulated",),
}
"""Group -> modules, each with ``QUESTIONS``."""


def questions_of(group: str) -> dict[str, Question]:
    """Return the questions of a group by key."""
    return {question.key: question for question in _questions(group)}


def _questions(group: str) -> Iterator[Question]:
    for name in MODULES[group]:
        yield from importlib.import_module(name).QUESTIONS


def answer_question(group: str, key: str, data_folder: Path) -> None:
    """Answer one question in this process and write its result files."""
    question = next(q for q in _questions(group) if q.key == key)
    start_s = time.perf_counter()
    result = question.answer(QuestionRun(data_folder, group, key))
    report = {
        "shows": question.shows,
        "command": f"python benchmark/run.py {group}/{key}",
        "seconds": round(time.perf_counter() - start_s, 1),
        "cpu_seconds": round(sum(os.times()[:4]), 1),
        "result": result,
    }
    path = result_path(group, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    result_file.write(path, report)


def _answer_in_process(group: str, key: str, data_folder: Path) -> tuple[str, float, str]:
    """Answer a question in a new process; return its name, seconds, and an error's last line or ``""``."""
    start_s = time.perf_counter()
    command = [sys.executable, __file__, f"{group}/{key}", "--here", "--data", str(data_folder)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    error = "" if process.returncode == 0 else (process.stderr.strip().splitlines() or ["?"])[-1]
    return f"{group}/{key}", time.perf_counter() - start_s, error


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="GROUP[/KEY]", help=", ".join(MODULES))
    add("--all", action="store_true", help="every group")
    add("--list", action="store_true", help="print the questions and run none")
    add("--missing", action="store_true", help="only questions without a result file")
    add("--data", type=Path, help="default: $CANOPY_DATA, else ../shared/data")
    add("--jobs", type=int, default=2, help="processes at a time (default 2)")
    add("--here", action="store_true", help="one GROUP/KEY in this process")
    options = parser.parse_args()
    data_folder = find_data_folder(options.data)
    if options.here:  # called by _answer_in_process
        answer_question(*options.names[0].split("/", 1), data_folder)
        return 0
    chosen: list[tuple[str, Question]] = []
    for name in [*MODULES] if options.all or not options.names else options.names:
        group, _, key = name.partition("/")
        if group not in MODULES:
            parser.error(f"no group {group}: there are {', '.join(MODULES)}")
        questions_by_key = questions_of(group)
        if key and key not in questions_by_key:
            parser.error(f"{group} has no {key}: it has {', '.join(questions_by_key)}")
        chosen += [(group, q) for q in questions_by_key.values() if key in ("", q.key)]
    if options.missing:
        chosen = [(group, q) for group, q in chosen if not result_path(group, q.key).exists()]
    if options.list:
        for group, question in chosen:
            print(f"{f'{group}/{question.key}':40} {question.shows}")
        return 0
    if not (options.all or options.names):
        parser.error("name a GROUP or a GROUP/KEY, or give --all or --list")
    if not data_folder.is_dir():
        parser.error(f"no folder {data_folder}: give --data DIR or set CANOPY_DATA")
    chosen.sort(key=lambda pair: -pair[1].cpu_minutes)
    failures = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [pool.submit(_answer_in_process, g, q.key, data_folder) for g, q in chosen]
        for future in tqdm(running, unit="question", disable=None):
            name, seconds, error = future.result()
            failures += bool(error)
            print(f"{name:40} {seconds:7.1f} s  {'FAILED: ' + error if error else 'ok'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
