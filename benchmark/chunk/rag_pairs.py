"""The same prompts with reuse and without, one request at a time."""

from __future__ import annotations

from typing import Any

import psutil
from rag_load import Answer, Library, Prompt, ask, off

Pair = tuple[Answer, Answer]
"""Return the answers to a prompt by plain serving and by reuse."""


def pairs(server: Any, lib: Library, chunks: int, repeats: int) -> tuple[Prompt, list[Pair]]:
    """Answers to ``repeats`` prompts, and the last of them; reuse runs first each time, since a
    plain run fills the exact tree."""
    found = []
    for _ in range(repeats):
        prompt = lib.prompt(chunks)
        fused = timed(server, prompt)
        assert fused.report.get("fused"), fused.report
        found.append((timed(server, off(prompt)), fused))
    return prompt, found


def timed(server: Any, prompt: Prompt, tops: int = 0) -> Answer:
    """Return an answer with the server's processor seconds for it."""
    before = cpu_s(server.process.pid)
    answer = ask(server.url, prompt, tops=tops)
    answer.cpu_s = cpu_s(server.process.pid) - before
    return answer


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process and its descendants."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)
