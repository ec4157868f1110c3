"""Text of an early refusal, which carries the time to wait from the scheduler to the HTTP process."""

from __future__ import annotations

import re

_WAIT = re.compile(r"; retry after (\d{1,6}) s$")


def message(limit_s: float, retry_after_s: int) -> str:
    """Return the answer to a refused request."""
    text = f"the predicted time to the first token exceeds the limit of {limit_s:g} s"
    return f"{text}; retry after {retry_after_s} s"


def retry_after_s(text: str) -> int:
    """Return the seconds in a text of ``message``; 1 for another text."""
    found = _WAIT.search(text)
    return int(found[1]) if found else 1
