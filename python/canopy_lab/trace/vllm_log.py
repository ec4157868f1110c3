"""vLLM's own log of a server started with ``--enable-log-requests``.

    INFO 09-10 19:10:44 [logger.py:41] Received request cmpl-1: prompt: 'Hello', params: ...

Since vLLM 0.11.1 prompts are in the lines ``Request ID details: prompt: ...``, which need
``VLLM_LOGGING_LEVEL=DEBUG``. Leave out ``--max-log-len``: it cuts prompts. Token ids are read if
they are logged, else the text. With ``--enable-log-outputs`` the answers' lengths are known, too.
"""

from __future__ import annotations

import ast
import datetime
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from canopy_lab.trace import lines
from canopy_lab.trace.container import BROKEN_DOCKER_LINE
from canopy_lab.trace.prompts import ORDER_WINDOW, LoggedPrompt
from canopy_lab.trace.record import STOPS
from sglang_canopy.errors import CanopyError

HOW_TO_LOG = "--enable-log-requests, from vLLM 0.11.1 on also with VLLM_LOGGING_LEVEL=DEBUG"
_PROMPT = re.compile(
    r"(?P<when>\d\d-\d\d \d\d:\d\d:\d\d).*?(?:Received request (?P<received_id>\S+): |Request (?P<details_id>\S+) details: )"
    r"prompt: (?P<prompt>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"), (?P<fields>.*)$",
    re.S,
)
_TOKEN_IDS = re.compile(r"prompt_token_ids: (\[[\d, ]*\])")
_ADAPTER = re.compile(r"lora_name='([^']*)'")
_ANSWER = re.compile(
    r"Generated response (?P<id>\S+?)(?: \(.*?\))?: output: .*output_token_ids: (?P<ids>None|\[[\d, ]*\])"
    r".*finish_reason: (?P<reason>\w+)",
    re.S,
)
_REQUEST_LINE = re.compile(r"Received request \S+: |Request \S+ details: ")
_UNREADABLE = "whose line is cut off or cannot be read"
_MIN_CUT_SHARE = 0.2
"""A limit has truncated prompts if more than this share are as long as the longest."""
_MIN_CUT = 3


def prompts(path: Path, tolerance: lines.Tolerance) -> Iterator[LoggedPrompt]:
    """Yield the prompts of ``path``, each once its answer is known or ``ORDER_WINDOW`` later."""
    unanswered: OrderedDict[str, LoggedPrompt] = OrderedDict()
    clock, prompt_count, longest = _LogClock(), 0, _LongestTexts()
    left_out = tolerance.understood.left_out
    without_prompt = detail_lines = 0
    for line, raw in lines.read_lines(path):
        if raw.startswith(BROKEN_DOCKER_LINE):
            left_out[_UNREADABLE] += 1
            continue
        text = raw.decode("utf-8", "replace").rstrip()
        answer = _ANSWER.search(text)
        if answer is not None:
            prompt = unanswered.pop(answer["id"], None)
            if prompt is not None:
                prompt.output_tokens = answer["ids"].count(",") + 1 if "[" in answer["ids"] else 0
                prompt.stop = STOPS.get(answer["reason"])
                yield prompt
            continue
        logged = _PROMPT.search(text)
        if logged is None:
            request_start = _REQUEST_LINE.search(text)
            if request_start is not None and text.startswith("prompt: ", request_start.end()):
                left_out[_UNREADABLE] += 1
            elif request_start is not None and request_start[0].startswith("Received"):
                without_prompt += 1
            continue
        prompt_count += 1
        detail_lines += logged["details_id"] is not None
        # A collector that lost the end of a line joins it to the next line.
        lost_lines = len(_REQUEST_LINE.findall(text, 0, logged.start("prompt"))) - 1
        if lost_lines > 0:
            left_out[_UNREADABLE] += lost_lines
        try:
            prompt = _prompt(logged, clock, line)
        except lines.BadLine as error:
            tolerance.count_bad(line, str(error))
            continue
        longest.add(prompt.text)
        request_id = logged["received_id"] or logged["details_id"]
        if request_id in unanswered and unanswered[request_id].text == prompt.text and unanswered[request_id].token_ids == prompt.token_ids:  # fmt: skip
            left_out["logged twice"] += 1
            continue
        unanswered[request_id] = prompt
        if len(unanswered) > ORDER_WINDOW // 2:
            yield unanswered.popitem(last=False)[1]
    yield from unanswered.values()
    if without_prompt > detail_lines:
        left_out[f"without a prompt (it needs {HOW_TO_LOG})"] += without_prompt - detail_lines
    if longest.count >= max(_MIN_CUT, _MIN_CUT_SHARE * prompt_count) and longest.is_limit:
        tolerance.understood.changed[
            f"are cut to {longest.longest:,} characters: start vLLM without --max-log-len"
        ] += longest.count
    if not prompt_count:
        raise CanopyError(f"{str(path)!r} holds no prompt; start vLLM with {HOW_TO_LOG}")


def _prompt(match: re.Match[str], clock: _LogClock, line: int) -> LoggedPrompt:
    prompt = LoggedPrompt(clock.time_s(match["when"]), line)
    adapter = _ADAPTER.search(match["fields"])
    prompt.salts = (adapter[1],) if adapter else ()
    ids = _TOKEN_IDS.search(match["fields"])
    try:
        if ids is not None and ids[1] != "[]":
            prompt.token_ids = [int(i) for i in ids[1][1:-1].split(",")]
            return prompt
        if match["prompt"] != "None":
            prompt.text = ast.literal_eval(match["prompt"])
            return prompt
    except (ValueError, SyntaxError) as error:
        raise lines.BadLine(f"its prompt cannot be read ({error})") from None
    raise lines.BadLine(f"neither the prompt nor its token ids were logged; use {HOW_TO_LOG}")


class _LongestTexts:
    """Length of the longest prompt text, and the number of prompts with that length."""

    def __init__(self) -> None:
        self.longest = self.count = 0
        self.hashes: set[int] = set()
        """Hashes of up to ``_MIN_CUT`` different texts; one text that repeats is not truncated."""

    @property
    def is_limit(self) -> bool:
        """Return whether different prompts have this length, or it is a typical limit."""
        return len(self.hashes) == _MIN_CUT or self.longest % 50 == 0 or self.longest % 64 == 0

    def add(self, text: str) -> None:
        """Add the text of a prompt; empty if its token ids are known."""
        if len(text) > self.longest:
            self.longest, self.count, self.hashes = len(text), 0, set()
        if text and len(text) == self.longest:
            self.count += 1
            if len(self.hashes) < _MIN_CUT:
                self.hashes.add(hash(text))


class _LogClock:
    """Times without a year: a time half a year earlier than the previous one begins a new year."""

    def __init__(self) -> None:
        self._year, self._last = 2000, ""

    def time_s(self, text: str) -> float:
        if self._last[:2] > "06" and text[:2] <= "06" and int(self._last[:2]) - int(text[:2]) > 5:
            self._year += 1
        self._last = max(self._last, text) if self._last[:2] <= text[:2] else text
        try:
            date = datetime.datetime.strptime(f"{self._year}-{text}", "%Y-%m-%d %H:%M:%S")
        except ValueError:
            raise lines.BadLine(f"its time must be month-day and time, got {text!r}") from None
        return date.replace(tzinfo=datetime.timezone.utc).timestamp()
