"""Rotary embedding, applied and undone exactly, so that a chunk's keys can move to new positions.

Keys are stored without rotation, but the cache that they are taken from holds rotated keys.
Rotation is therefore undone, in fp32, dividing by ``cos^2 + sin^2``: this also undoes a scaled
rotation (YaRN's attention factor) and a table rounded to bf16.
"""

from __future__ import annotations

import abc
from typing import Any

import torch

from canopy_kernel.rows import RotationFactors, rotate_by
from sglang_canopy.errors import CanopyError

#: Variants whose angle is position x a fixed frequency: a chunk may move under them.
SUPPORTED = ("default", "linear", "llama3", "yarn")
#: Known variants that cannot be moved, and why.
REFUSED = {
    "dynamic": "its frequencies change with the length of the prompt",
    "longrope": "its frequencies change with the length of the prompt",
    "mrope": "a token's position has three coordinates",
    "proportional": "only part of each head is rotated",
}


class Rotation(abc.ABC):
    """Half-split (NeoX) rotation of the whole head."""

    __slots__ = ()

    @abc.abstractmethod
    def table(self, positions: torch.Tensor) -> torch.Tensor:
        """``[n]`` positions -> ``[n, head_dim]`` fp32, cos in the first half and sin in the second."""

    def apply(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate ``x [..., n, heads, head_dim]`` to ``positions [n]``, in fp32; returns
        x's dtype."""
        return rotate(x, self.table(positions))

    def undo(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Invert :meth:`apply`; returns fp32 for any dtype of ``x``."""
        return unrotate(x, self.table(positions))


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate ``x [..., n, heads, d]`` by a ``[n, d]`` cos-sin table. Returns x's dtype."""
    cos, sin = table[:, None].chunk(2, dim=-1)
    half = cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half:].float()
    out = torch.empty_like(x)
    out[..., :half] = a * cos - b * sin
    out[..., half:] = b * cos + a * sin
    return out


def rotate_into(x: torch.Tensor, factors: RotationFactors, out: torch.Tensor) -> None:
    """Write :func:`rotate` of ``x [n, heads, d]`` into ``out``, which must not overlap ``x``.

    ``factors``: the ``rotation_factors`` of a table, computed once for all layers. With fp32 this takes a third
    of :func:`rotate`'s time.
    """
    if x.dtype == out.dtype == torch.float32:
        rotate_by(x, factors, out)
    else:
        out.copy_(rotate_by(x.float(), factors))


def unrotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Undo :func:`rotate` in fp32, for any rounding or scale of the table."""
    cos, sin = table[:, None].float().chunk(2, dim=-1)
    half = cos.shape[-1]
    norm = cos * cos + sin * sin
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([(a * cos + b * sin) / norm, (b * cos - a * sin) / norm], dim=-1)


def undo_checked(x: torch.Tensor, rope: Rotation, positions: torch.Tensor) -> torch.Tensor:
    """Undo a rotation in fp32 and check it by applying it again.

    There is no check on a device, because it would wait for the device; ``prove_rotation`` checks
    once instead, when a server adopts its table.

    Raises RuntimeError if re-applying does not reproduce ``x`` within rounding: the KV was then not
    rotated by this table (a wrong position, or an unsupported variant).
    """
    raw = rope.undo(x, positions)
    if x.device.type != "cpu":
        return raw
    rotated = rope.apply(raw, positions)
    limit = 1e-5 * max(1.0, float(x.abs().max())) if x.numel() else 0.0
    error = float((rotated - x.float()).abs().max()) if x.numel() else 0.0
    if not error <= limit:
        raise RuntimeError(f"undoing RoPE is off by {error:.2e} > {limit:.2e}")
    return raw


def prove_rotation(rope: Rotation, head_dim: int, device: torch.device, count: int = 64) -> None:
    """Check that a table can be undone to within 1e-4; waits for the device. Raises RuntimeError."""
    positions = torch.arange(count)
    x = torch.linspace(-1.0, 1.0, count * head_dim).view(count, 1, head_dim)
    rotated = rope.undo(rope.apply(x.to(device), positions), positions).cpu()
    error = float((rotated - x).abs().max())
    if not error <= 1e-4:
        raise RuntimeError(f"undoing RoPE is off by {error:.2e} of values up to 1")


def movable_variant(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the RoPE variant of a Hugging Face config, and its parameters.

    Raises CanopyError, naming the variant, if it cannot be moved.
    """
    scaling = getattr(config, "rope_scaling", None) or {}
    params = dict(getattr(config, "rope_parameters", None) or scaling)
    variant = str(params.get("rope_type") or params.get("type") or "default")
    if "mrope_section" in params:
        variant = "mrope"
    partial = params.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
    if variant in REFUSED or variant not in SUPPORTED or (partial or 1.0) != 1.0:
        reason = REFUSED.get(variant, "it has not been shown to move exactly")
        if (partial or 1.0) != 1.0:
            reason = f"only {partial} of each head is rotated"
        raise CanopyError(
            f"RoPE variant {variant!r} is not supported for reuse of documents: {reason}; "
            f"supported are {', '.join(SUPPORTED)}. Serve this model without --canopy-documents."
        )
    return variant, params
