"""Prompts and parameters that SGLang takes as they come, and that end a request badly, or a server.

SGLang looks a negative token up in the embedding, which ends the scheduler and everybody's requests
with it; and it looks for the parameters of a prompt that has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_canopy.errors import CanopyError


def check_prompts(obj: Any, vocabulary: int) -> None:
    """Raise ``CanopyError`` for a request, or batch of them, that names tokens which do not exist,
    or has too few sampling parameters.

    ``obj``: SGLang's internal request, before it is normalised. ``vocabulary``: of the model, in
    tokens. Adapters and images may add tokens behind it.
    """
    prompts = _prompts(obj)
    if isinstance(obj.sampling_params, list) and len(obj.sampling_params) < len(prompts or ()):
        raise CanopyError(
            f"sampling_params is a list of {len(obj.sampling_params)} for {len(prompts or ())} "
            "prompts; give one for each, or one object for all"
        )
    if getattr(obj, "text", None) is not None or not getattr(obj, "input_ids", None):
        return
    extended = any(getattr(obj, name, None) for name in ("lora_path", "image_data", "mm_inputs"))
    for ids in prompts or [obj.input_ids]:
        lowest, highest = (min(ids), max(ids)) if len(ids) else (0, 0)
        wrong = lowest if lowest < 0 else highest
        if lowest < 0 or (highest >= vocabulary and not extended):
            raise CanopyError(
                f"input_ids has the token {wrong}; this model's are from 0 to {vocabulary - 1}"
            )


def _prompts(obj: Any) -> Sequence[Any] | None:
    """The prompts of a batch; ``None`` for a single request."""
    text, ids = getattr(obj, "text", None), getattr(obj, "input_ids", None)
    if text is not None:
        return None if isinstance(text, str) else text
    if ids is None or not len(ids) or isinstance(ids[0], int):
        return None
    return ids
