"""Whether an answer calls a tool, by SGLang's own parser of the answer's text."""

from __future__ import annotations

import functools
import logging
from typing import Any

from sglang_canopy.wire.stamp import FORCED_CALL

logger = logging.getLogger(__name__)


def calls_tool(req: Any, parser: str | None) -> bool:
    """Return whether the answer of SGLang's ``req`` calls a tool. ``parser``: name of
    SGLang's parser, or ``FORCED_CALL``, from the stamp; ``None`` without tools."""
    if parser is None or parser == FORCED_CALL:
        return parser is not None
    tokenizer = getattr(req, "tokenizer", None)
    if tokenizer is None or (detector := _make_detector(parser, tokenizer)) is None:
        return False
    return bool(detector.has_tool_call(tokenizer.decode(list(req.output_ids))))


@functools.lru_cache(maxsize=4)
def _make_detector(parser: str, tokenizer: Any) -> Any:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    try:
        return FunctionCallParser([], parser, tokenizer=tokenizer).detector
    except ValueError as error:  # the parser is unknown, or of another model
        logger.warning("canopy: tool calls are not recognised with %s: %s", parser, error)
        return None
