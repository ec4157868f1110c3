"""Small traces and a profile whose costs can be worked out by hand."""

import itertools
from collections.abc import Sequence

from canopy_lab.sim.system import Bandwidth, EngineProfile
from canopy_lab.trace.record import TraceRequest

KV_BYTES = 1000
"""Bytes per token."""


def profile(*, token_s: float = 0.001, layers: int = 10, **overrides: object) -> EngineProfile:
    """Return a profile with ``token_s`` a token of prefill and 0.01 s a decode step of any batch."""
    fields: dict = {
        "name": "by hand",
        "model": "toy",
        "device": "paper",
        "date": "2026-01-01",
        "source": "published figures, not measured",
        "kv_bytes_per_token": KV_BYTES,
        "layers": layers,
        "prefill_tokens": (0, 1000),
        "prefill_linear_s": (0.0, 1000 * token_s),
        "attention_new_tokens": (1, 1000),
        "attention_context_tokens": (0, 1000),
        "attention_s": ((0.0, 0.0), (0.0, 0.0)),
        "decode_batch": (1, 64),
        "decode_context_tokens": (0, 1000),
        "decode_step_s": ((0.01, 0.01), (0.01, 0.01)),
        "host": Bandwidth(1e9, 1e9),
    }
    return EngineProfile(**{**fields, **overrides})


def request(
    time_s: float,
    blocks: Sequence[int],
    *,
    block_tokens: int = 10,
    output_tokens: int = 1,
    **fields: object,
) -> TraceRequest:
    """Return a request with a prompt of whole blocks."""
    input_tokens = len(blocks) * block_tokens
    return TraceRequest(time_s, input_tokens, output_tokens, tuple(blocks), block_tokens, **fields)  # type: ignore[arg-type]


def rounds(
    prompts: int, times: int, *, prompt_blocks: int = 10, interval_s: float = 1.0, **fields: object
) -> list[TraceRequest]:
    """Return ``prompts`` different prompts in sequence, repeated ``times`` times."""
    requests = []
    for i, prompt in enumerate(itertools.chain.from_iterable([range(prompts)] * times)):
        path = range(prompt * prompt_blocks + 1, (prompt + 1) * prompt_blocks + 1)
        requests.append(request(i * interval_s, tuple(path), **fields))  # type: ignore[arg-type]
    return requests
