"""Validation of prompts and parameters that SGLang does not check.

SGLang looks up a negative token in the embedding, which terminates the scheduler and all its requests. It
also fails on a batch with fewer sampling parameters than prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_canopy.errors import CanopyError

BODY_CHECKS: dict[str, Callable[[Mapping[str, Any], Any], None]] = {}
"""Checks of other plugins by name, before a response starts, of a body and its request's tenant and
sampling parameters. Each raises ``CanopyError``."""

_CHECKED = "canopy_tokens_checked"
"""Set on a request whose tokens are valid: a stream's are checked before it starts."""


def check_prompts(obj: Any, vocabulary: int) -> None:
    """Raise ``CanopyError`` for a request or batch with invalid tokens or too few sampling
    parameters. Tokens that were valid are not read again.

    ``obj``: SGLang's internal request, before normalisation. ``vocabulary``: the model's number of
    tokens; adapters and images may add higher token ids.
    """
    prompts = _prompts(obj)
    if isinstance(obj.sampling_params, list) and len(obj.sampling_params) < len(prompts or ()):
        raise CanopyError(
            f"sampling_params is a list of {len(obj.sampling_params)} for {len(prompts or ())} "
            "prompts; give one for each, or one object for all"
        )
    if getattr(obj, "text", None) is not None or not getattr(obj, "input_ids", None):
        return
    if getattr(obj, _CHECKED, False):
        return
    extended = any(getattr(obj, name, None) for name in ("lora_path", "image_data", "mm_inputs"))
    for ids in prompts or [obj.input_ids]:
        lowest, highest = (min(ids), max(ids)) if len(ids) else (0, 0)
        wrong = lowest if lowest < 0 else highest
        if lowest < 0 or (highest >= vocabulary and not extended):
            raise CanopyError(
                f"input_ids has the token {wrong}; this model's are from 0 to {vocabulary - 1}"
            )
    setattr(obj, _CHECKED, True)


def _prompts(obj: Any) -> Sequence[Any] | None:
    """Return the prompts of a batch; ``None`` for a single request."""
    text, ids = getattr(obj, "text", None), getattr(obj, "input_ids", None)
    if text is not None:
        return None if isinstance(text, str) else text
    if ids is None or not len(ids) or isinstance(ids[0], int):
        return None
    return ids
