"""Make a server generate the trace's tokens instead of the model's (ATC 2025 paper, section 4.3).

In a replay, the next turn of a conversation must contain the text generated in this turn, but a
model given made-up tokens generates other text. A server started with
``--canopy-enable-forced-output`` follows ``custom_params["canopy_force_output"]``, a list of token
ids: output token i is the list's token i, up to its end, regardless of the sample. Time and memory
are those of real decoding; only the choice of the token is replaced.

Data is neither unpickled nor executed: the list is sent like every sampling parameter, and one hook
writes it over the sampled ids. Every tensor-parallel rank has the same list, so all ranks agree.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_canopy.errors import CanopyError
from sglang_canopy.server.start.hook import Hook
from sglang_canopy.wire.request_state import state_of
from sglang_canopy.wire.stamp import FORCE_OUTPUT

PARAM_KEY = FORCE_OUTPUT
ATTRIBUTE = "_canopy_forced_output"
"""Attribute of ``ServerArgs``: whether outputs are forced."""

_ANY_TOKEN = 1 << 31


def is_on(server_args: Any) -> bool:
    """Return whether a server's outputs may be forced."""
    return getattr(server_args, ATTRIBUTE, False)


class ForcedOutput(NamedTuple):
    """One running request's output, as given."""

    prompt_tokens: int
    tokens: Sequence[int]


def check_tokens(custom_params: Any, vocab_size: int) -> list[int] | None:
    """Return a request's forced tokens, or ``None``. Raises ``CanopyError`` (answered with 400)."""
    if not isinstance(custom_params, Mapping) or PARAM_KEY not in custom_params:
        return None
    tokens = custom_params[PARAM_KEY]
    is_id_list = isinstance(tokens, list) and set(map(type, tokens)) <= {int}
    if not is_id_list or (tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size)):
        raise CanopyError(
            f"custom_params key {PARAM_KEY!r} must be a list of token ids from 0 to {vocab_size - 1}"
        )
    return tokens


def replacements(
    forced_by_rid: Mapping[str, ForcedOutput], rids: Sequence[str], seq_lens: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield ``(row, token id)`` for every row of a batch whose next token is forced.

    ``seq_lens``: tokens of each row with KV after this forward pass, so the token sampled now is
    output number ``seq_len - prompt_tokens``. It is negative during a chunked prefill, whose sample
    is discarded.
    """
    for row, (rid, length) in enumerate(zip(rids, seq_lens, strict=False)):
        forced = forced_by_rid.get(rid)
        if forced is not None:
            output_index = int(length) - forced.prompt_tokens
            if 0 <= output_index < len(forced.tokens):
                yield row, forced.tokens[output_index]


class _RunningRequests(Mapping[str, ForcedOutput]):
    """The running requests with a forced output; a request is removed with its ``Req``."""

    def __init__(self) -> None:
        self._reqs: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def add(self, req: Any) -> None:
        self._reqs[req.rid] = req

    def __getitem__(self, rid: str) -> ForcedOutput:
        req = self._reqs[rid]
        return ForcedOutput(len(req.origin_input_ids), state_of(req).params[PARAM_KEY])

    def __iter__(self) -> Iterator[str]:
        return iter(self._reqs)

    def __len__(self) -> int:
        return len(self._reqs)


running_requests = _RunningRequests()


def record_forced_request(_result: Any, scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    """Hook after ``Scheduler._add_request_to_queue``: record a request with forced output."""
    params = state_of(req).params
    if PARAM_KEY in params and is_on(scheduler.server_args):
        with contextlib.suppress(CanopyError):  # the HTTP entry has refused an invalid list
            check_tokens(params, _ANY_TOKEN)
            running_requests.add(req)


def validate(_result: None, params: Any, vocab_size: int) -> None:
    """Hook after ``SamplingParams.verify``: refuse an invalid forced output as the client's error."""
    check_tokens(params.custom_params, vocab_size)


def force_tokens(next_token_ids: Any, _runner: Any, _logits: Any, batch: Any) -> Any:
    """Hook after ``ModelRunner.sample``: write the forced tokens over the sampled ones."""
    if not running_requests:
        return None
    lengths = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.seq_lens
    replaced = list(replacements(running_requests, batch.rids, lengths.tolist()))
    if not replaced:
        return None
    import torch

    rows, tokens = zip(*replaced, strict=True)
    return next_token_ids.index_copy(
        0,
        torch.tensor(rows, device=next_token_ids.device),
        torch.tensor(tokens, dtype=next_token_ids.dtype, device=next_token_ids.device),
    )


_SRT = "sglang.srt."

HOOKS = tuple(
    Hook(target, "after", hook, names, "force outputs, for replayed traces")
    for target, hook, names in (
        (
            _SRT + "managers.scheduler.Scheduler._add_request_to_queue",
            record_forced_request,
            ("self", "req"),
        ),
        (_SRT + "sampling.sampling_params.SamplingParams.verify", validate, ("self", "vocab_size")),
        (
            _SRT + "model_executor.model_runner.ModelRunner.sample",
            force_tokens,
            ("self", "logits_output", "forward_batch"),
        ),
    )
)
