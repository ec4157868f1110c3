"""Prompts of SGLang's request log as text, for comparisons of words instead of blocks."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from canopy_lab.trace import lines
from canopy_lab.trace.prompts import LoggedPrompt
from canopy_lab.trace.sglang_log import HEALTH_CHECK, is_warm_up, labels_of, was_refused
from canopy_lab.trace.sglang_prompt import event_of, object_in, token_ids


def prompts(path: Path, tolerance: lines.Tolerance) -> Iterator[LoggedPrompt]:
    """Yield the finished requests, earliest end first.

    Token ids are not decoded. Refused requests, health checks and the warm-up are ignored.
    """
    previous_text = b""
    for line, text in lines.read_lines(path):
        try:
            event = event_of(text, ("request.finished",))
            if event is None or text == previous_text:  # two handlers may write every line twice
                continue
            previous_text = text
            prompt = _prompt(event, line)
        except lines.BadLine as error:
            tolerance.count_bad(line, error)
            continue
        if prompt is not None:
            yield prompt


def _prompt(event: Mapping[str, Any], line: int) -> LoggedPrompt | None:
    logged, meta = object_in(event, "obj"), object_in(event, "out", "meta_info")
    if str(event.get("rid")).startswith(HEALTH_CHECK) or was_refused(meta) or is_warm_up(logged):
        return None
    ids, text = token_ids(logged), logged.get("text")
    if not ids and not isinstance(text, str):
        return None
    prompt = LoggedPrompt(_time_s(event), line)
    if ids:
        prompt.token_ids = ids
    else:
        prompt.text = str(text)
    prompt.conversation, prompt.category = labels_of(logged)
    adapter = logged.get("lora_id") or logged.get("lora_path") or ""
    salts = (logged.get("extra_key") or "", logged.get("cache_salt") or "")
    prompt.salts = ("", str(adapter), *map(str, salts))
    return prompt


def _time_s(event: Mapping[str, Any]) -> float:
    try:
        return datetime.datetime.fromisoformat(str(event.get("timestamp"))).timestamp()
    except ValueError:
        return 0.0
