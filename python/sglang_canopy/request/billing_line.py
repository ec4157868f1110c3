"""Claude Code's billing line, which has a nonce in each request: no later token could be found.

It is the first line of a system text on ``/v1/messages``. ``CLAUDE_CODE_ATTRIBUTION_HEADER=0`` keeps
the client from sending it.
"""

from __future__ import annotations

import re
from typing import Any

FLAG = "--canopy-strip-billing-line"
_FIRST_LINE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")


def strip(request: Any) -> None:
    """Remove the line from the system texts of ``request``, SGLang's model of ``/v1/messages``."""
    if isinstance(request.system, str):
        request.system = _FIRST_LINE.sub("", request.system)
    for block in request.system if isinstance(request.system, list) else ():
        block.text = _FIRST_LINE.sub("", block.text) if block.text else block.text
