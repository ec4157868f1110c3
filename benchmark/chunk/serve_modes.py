"""Every mode of the server on one workload: time to first token, closeness, answers kept."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rag_load import Answer, Prompt, ask, flush, median, settle
from rag_pairs import kl
from rag_server import Rows, started

from canopy_chunks.quality import holds, tokenise
from canopy_chunks.tasks import SYNTHETIC, filler_from, read, synthetic

REFERENCE = "prefix"
"""The mode that the others are compared with: exact, and what they have to beat."""


def modes(tokenizer: Any, args: argparse.Namespace) -> None:
    """One server a mode, the same prompts in each: facts hidden in real documents.

    KL and the first token are against the mode ``prefix`` (run first if it is not among the
    modes); answers are generated greedily, and kept if full serving's were right. A run that was
    stopped is taken up: modes whose row is in ``--json`` are not run again, and the reference is
    read from its neighbour ``*.reference.json``.
    """
    filler = filler_from(read(args.data), words=int(0.62 * args.tokens / (args.chunks or 6)))
    each = -(-args.prompts // len(SYNTHETIC))
    made = synthetic(SYNTHETIC, each, filler, args.chunks or 6, args.seed)[: args.prompts]
    cases = [tokenise(tokenizer, e, 99, 4096) for e in made]
    longest = max(len(c.ids) for c in cases)
    rows, names = Rows(args), args.modes.split(",")
    reference: list[dict[str, Any]] | None = _saved(args.json)
    if reference is None and REFERENCE in names:
        names = [REFERENCE, *(n for n in names if n != REFERENCE)]
    elif reference is None:
        names = [REFERENCE, *names]
    done = rows.take_up("mode")
    names = [name for name in names if name not in done]
    print(f"{len(cases)} prompts of up to {longest} tokens; done before: {', '.join(done) or '-'}")
    print("mode        TTFT p50  recomputed  same first  KL top-20  answers kept")
    for name in names:
        args.mode = name
        with started(args, longest, 2) as server:
            answers = [_ask(server.url, case, args.new_tokens) for case in cases]
        if reference is None:
            reference = [{"top": a.top, "text": tokenizer.decode(b.ids)} for a, b in answers]
            _save(args.json, reference)
        row = _row(tokenizer, name, cases, answers, reference)
        rows.add(row)
        print(
            f"{name:10} {row['ttft_s']:8.2f} s {row['recomputed']:10.0f}"
            f"  {row['same_first']:10.2f}  {row['kl_top20']:9.3f}  {row['kept']} of {row['right']}",
            flush=True,
        )


def _ask(url: str, case: Any, new_tokens: int) -> tuple[Answer, Answer]:
    """The documents are shown in another order and learnt; then the prompt is asked twice: for its
    first token, and, out of an empty exact cache, for an answer."""
    bounds, at = [], len(case.prefix)
    for document in case.documents:
        bounds += [at, at + len(document)]
        at += len(document)
    prompt = Prompt(case.ids, bounds, ())
    ask(url, _turned(case))
    settle(url)
    asked = ask(url, prompt, tops=20)
    flush(url)  # the whole prompt is in the exact tree where the mode is exact
    return asked, ask(url, prompt, new_tokens, stream=False)


def _turned(case: Any) -> Prompt:
    """The same documents, last first."""
    ids, bounds = list(case.prefix), []
    for document in reversed(case.documents):
        bounds += [len(ids), len(ids) + len(document)]
        ids += document
    return Prompt(ids + case.question, bounds, ())


def _row(
    tokenizer: Any, name: str, cases: list[Any], answers: list[Any], reference: list[dict[str, Any]]
) -> dict[str, Any]:
    right = kept = 0
    for case, (_, answer), true in zip(cases, answers, reference):
        if holds(true["text"], case.answers):
            right += 1
            kept += holds(tokenizer.decode(answer.ids), case.answers)
    tops = [(true["top"], asked.top) for (asked, _), true in zip(answers, reference)]
    return {
        "mode": name,
        "ttft_s": median([asked.ttft_s for asked, _ in answers]),
        "recomputed": median([asked.report.get("recomputed", 0) for asked, _ in answers]),
        "fused": sum(bool(asked.report.get("fused")) for asked, _ in answers),
        "same_first": sum(max(p, key=p.get) == max(q, key=q.get) for p, q in tops) / len(tops),
        "kl_top20": sum(kl(p, q) for p, q in tops) / len(tops),
        "right": right,
        "kept": kept,
        "all_s": [asked.ttft_s for asked, _ in answers],
    }


def _reference(path: Path) -> Path:
    return path.with_suffix(".reference.json")


def _save(path: Path | None, reference: list[dict[str, Any]]) -> None:
    if path is not None:
        _reference(path).write_text(json.dumps(reference))


def _saved(path: Path | None) -> list[dict[str, Any]] | None:
    if path is None or not _reference(path).is_file():
        return None
    found = json.loads(_reference(path).read_text())
    return [{**r, "top": {int(t): p for t, p in r["top"].items()}} for r in found]
