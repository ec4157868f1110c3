"""Bytes and prefill FLOPs of a model with some layers of full and others of linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from canopy_lab.sim.model import ModelShape
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class HybridShape:
    """``attention`` has the layers of full attention alone; the others keep a state each."""

    attention: ModelShape
    linear_layers: int
    state_bytes_per_layer: int
    """Recurrent and convolution state of one layer and one sequence."""
    linear_flops_per_token: int
    """Forward FLOPs of one token through one linear layer, its feed-forward included."""

    @property
    def kv_bytes_per_token(self) -> int:
        return self.attention.kv_bytes_per_token()

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, over all layers."""
        return self.linear_layers * self.state_bytes_per_layer

    def prefill_flops(self, tokens: int) -> int:
        """FLOPs to prefill ``tokens`` from nothing."""
        linear = self.linear_layers * self.linear_flops_per_token * tokens
        return linear + self.attention.prefill_flops(tokens)


def _gated_delta(
    hidden: int, key_heads: int, value_heads: int, dim: int, active_width: int
) -> tuple[int, int]:
    """State bytes and FLOPs a token of one gated-delta layer (arXiv 2412.06464), float32 states.

    Projections of q, k, v, z and the output; the update and the read of a ``dim`` by ``dim`` state
    a value head; a gated feed-forward of ``active_width``.
    """
    keys, values = key_heads * dim, value_heads * dim
    convolved = 2 * keys + values
    state = 4 * value_heads * dim * dim + 2 * 3 * convolved
    weights = hidden * (2 * keys + 2 * values) + values * hidden + 3 * hidden * active_width
    return state, 2 * weights + 6 * value_heads * dim * dim


def _hybrid(attention: ModelShape, linear_layers: int, *linear: int) -> HybridShape:
    state, flops = _gated_delta(*linear)
    return HybridShape(attention, linear_layers, state, flops)


PRESETS = {
    # From the published config.json of each: layers of full attention and of linear attention,
    # hidden size, heads, and the width of the experts that one token passes (shared one included).
    "qwen3-next-80b-a3b": _hybrid(
        ModelShape(12, 2048, 16, 2, 256, 11 * 512), 36, *(2048, 16, 32, 128, 11 * 512)
    ),
}


def preset(name: str) -> HybridShape:
    """A model by name. Raises ``CanopyError``."""
    try:
        return PRESETS[name]
    except KeyError:
        raise CanopyError(
            f"unknown hybrid model {name!r}; choose from: {', '.join(PRESETS)}"
        ) from None
