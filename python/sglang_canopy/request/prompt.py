"""Prompts before SGLang reads them: checks that it lacks, on every route, and the billing line.

SGLang 0.5.23 ends its scheduler, with all requests, at a prompt without tokens, a token that the
model lacks, more top log-probabilities than tokens, or a sampling parameter of another type or range
than its tensors take. Its HTTP process stops at millions of samples, and fails on a batch with fewer
sampling parameters than prompts.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sglang_canopy.errors import CanopyError

MAX_SAMPLES = 65_536
"""Maximum answers to one HTTP request; each is a request to the scheduler."""

BODY_CHECKS: dict[str, Callable[[Mapping[str, Any], Any], None]] = {}
"""Checks of other plugins by name, before a response starts, of a body and its request's tenant and
sampling parameters. Each raises ``CanopyError``."""


_TEXT_PARAMS = ("json_schema", "regex", "ebnf", "structural_tag")
_MAX_INT32, _MAX_FLOAT32, _MAX_FLOAT64 = 2**31 - 1, 3.4028235e38, sys.float_info.max
"""Largest numbers of SGLang's tensors, and the largest that PyTorch converts to them."""

BILLING_FLAG = "--canopy-strip-billing-line"
_BILLING_LINE = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")


def check_sizes(obj: Any) -> None:
    """Raise ``CanopyError`` for too many samples, or fewer sampling parameters than prompts. ``obj``:
    SGLang's internal request or batch, before normalisation. Its sampling parameters lose
    ``is_normalized``, which SGLang accepts from clients and for which it skips its own checks."""
    params, prompts = obj.sampling_params, _count_prompts(obj)
    param_sets = params if isinstance(params, list) else [params]
    if isinstance(params, list) and len(params) < prompts:
        raise CanopyError(
            f"sampling_params is a list of {len(params)} for {prompts} prompts; give one for each, "
            "or one object for all"
        )
    for param_set in (s for s in param_sets if isinstance(s, dict)):
        param_set.pop("is_normalized", None)
        samples = param_set.get("n")
        if isinstance(samples, int) and samples > 1 and samples * prompts > MAX_SAMPLES:
            raise CanopyError(
                f"n={samples} for {prompts} prompts is more than {MAX_SAMPLES} answers; send several "
                "requests"
            )


def check_prompt(manager: Any, obj: Any, input_ids: Any) -> None:
    """Hook before ``TokenizerManager._validate_one_request``, on each prompt of every route. Raises
    ``CanopyError``. Adapters and images may add higher token ids."""
    if not hasattr(obj, "top_logprobs_num") or input_ids is None:  # embeddings, input_embeds
        return
    vocabulary = manager.model_config.vocab_size
    if not len(input_ids) and not obj.session_params:
        raise CanopyError("the prompt has no tokens; give at least one")
    lowest, highest = (min(input_ids), max(input_ids)) if len(input_ids) else (0, 0)
    has_more_ids = obj.lora_path or obj.image_data or obj.video_data or obj.audio_data
    if lowest < 0 or (highest >= vocabulary and not has_more_ids):
        raise CanopyError(
            f"input_ids has the token {lowest if lowest < 0 else highest}; this model's are from 0 "
            f"to {vocabulary - 1}"
        )
    if isinstance(obj.top_logprobs_num, int) and obj.top_logprobs_num > vocabulary:
        raise CanopyError(
            f"{obj.top_logprobs_num} top log-probabilities were requested; this model has "
            f"{vocabulary} tokens"
        )


def check_message(message: Any, manager: Any, *_: Any, **__: Any) -> None:
    """Hook after ``TokenizerManager._create_tokenized_object``, on each message to the scheduler.
    Raises ``CanopyError`` for fields with which the scheduler cannot compute. Other wrong ones are
    refused by SGLang itself."""
    params, vocabulary = message.sampling_params, manager.model_config.vocab_size
    if getattr(message, "return_logprob", False) and message.logprob_start_len < -1:
        raise CanopyError(f"logprob_start_len must be at least -1, got {message.logprob_start_len}")
    session = getattr(message, "session_params", None)
    if session is not None and isinstance(session.id, list | dict):
        raise CanopyError(f"session_params key 'id' must be a string, got {session.id!r:.60}")
    if (embeds := getattr(message, "positional_embed_overrides", None)) is not None:
        from sglang.srt.managers.embed_types import PositionalEmbeds

        if not isinstance(embeds, PositionalEmbeds):  # JSON holds none
            raise CanopyError(f"positional_embed_overrides must be tensors, got {embeds!r:.60}")
    for key in _TEXT_PARAMS:
        if not isinstance(text := getattr(params, key), str | None):
            _refuse(key, "a string", text)
    if params.top_k > _MAX_INT32:
        _refuse("top_k", f"at most {_MAX_INT32}", params.top_k)
    if not isinstance(params.stream_interval, int | float | None):
        _refuse("stream_interval", "a number", params.stream_interval)
    bias = {} if params.logit_bias is None else params.logit_bias
    for value in bias.values() if isinstance(bias, Mapping) else [bias]:
        bound = _MAX_FLOAT64 if isinstance(value, int) else math.inf
        upper = bound if params.top_k == 1 else _MAX_FLOAT32  # only a greedy request takes infinity
        if not isinstance(value, int | float) or not -bound <= value <= upper:
            _refuse("logit_bias", f"an object of numbers up to {_MAX_FLOAT32:g}", value)
    for token in (params.stop_token_ids or ()) if params.min_new_tokens else ():
        if not 0 <= token <= vocabulary:
            _refuse("stop_token_ids", f"tokens from 0 to {vocabulary - 1}", token)


def _refuse(key: str, allowed: str, value: Any) -> NoReturn:
    raise CanopyError(f"sampling_params key {key!r} must be {allowed}, got {value!r:.60}")


def _count_prompts(obj: Any) -> int:
    if obj.text is not None:
        return 1 if isinstance(obj.text, str) else len(obj.text)
    ids = obj.input_ids
    return 1 if not ids or isinstance(ids[0], int) else len(ids)


def strip_billing_line(request: Any) -> None:
    """Remove Claude Code's billing line from the system texts of SGLang's model of ``/v1/messages``. It
    has a nonce in each request, so no later token could be found. The client does not send it with
    ``CLAUDE_CODE_ATTRIBUTION_HEADER=0``."""
    if isinstance(request.system, str):
        request.system = _BILLING_LINE.sub("", request.system)
    for block in request.system if isinstance(request.system, list) else ():
        block.text = _BILLING_LINE.sub("", block.text) if block.text else block.text
