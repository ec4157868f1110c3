"""Low-pass energy: norm of a token's K and V in a chunk's low frequencies (CacheTune).

The transform runs along the tokens of one chunk (torch's FFT). One pass over the reconstruction computes
both norms and their mean.
"""

from __future__ import annotations

import math

import torch

from canopy_kernel.triton_shim import tl, triton


def reconstruct(x: torch.Tensor, alpha: float, high_pass: bool = False) -> torch.Tensor:
    """Return the low-pass part of ``x [layers, n, width]`` along tokens, in fp32 (equations 2 to 4).

    Keep the bins ``k < floor(alpha * (floor(n / 2) + 1))`` of the one-sided spectrum, or the others with
    ``high_pass``.
    """
    n = x.shape[1]
    if n == 0:
        return x.float()
    spectrum = torch.fft.rfft(x.float(), dim=1)
    kept_bins = math.floor(alpha * spectrum.shape[1])
    if high_pass:
        spectrum[:, :kept_bins] = 0
    else:
        spectrum = spectrum[:, :kept_bins]  # irfft pads with zeros up to n
    if spectrum.shape[1] == 0:
        return torch.zeros_like(x, dtype=torch.float32)
    return torch.fft.irfft(spectrum, n=n, dim=1)


def reference(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return ``[layers, n]``: mean of the norms of ``k, v [layers, n, width]`` (equation 5)."""
    return 0.5 * (k.float().norm(dim=-1) + v.float().norm(dim=-1))


@triton.jit
def _energy_kernel(
    k_ptr, v_ptr, out_ptr, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_mask = row < count
    key_square = tl.zeros([BLOCK], tl.float32)
    value_square = tl.zeros([BLOCK], tl.float32)
    for first_column in range(0, WIDTH, STEP):
        column = first_column + tl.arange(0, STEP)
        offset = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        mask = row_mask[:, None] & (column < WIDTH)[None, :]
        k = tl.load(k_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        key_square += tl.sum(k * k, axis=1)
        value_square += tl.sum(v * v, axis=1)
    tl.store(out_ptr + row, 0.5 * (tl.sqrt(key_square) + tl.sqrt(value_square)), mask=row_mask)


BLOCK_ROWS, STEP_COLUMNS = 8, 128
"""Rows per program, and columns per load."""


def energy_triton(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Launch the Triton kernel; arguments as in :func:`reference`."""
    layers, n, width = k.shape
    out = torch.empty(layers, n, dtype=torch.float32, device=k.device)
    if out.numel():
        grid = (triton.cdiv(layers * n, BLOCK_ROWS),)
        sizes = (layers * n, width, BLOCK_ROWS, STEP_COLUMNS)
        _energy_kernel[grid](k.contiguous(), v.contiguous(), out, *sizes)
    return out


def lowpass_energy(
    k: torch.Tensor, v: torch.Tensor, alpha: float = 0.5, high_pass: bool = False
) -> torch.Tensor:
    """Return fp32 energies ``[layers, n]`` of one chunk's ``k, v [layers, n, width]``."""
    if not k.is_cuda:
        # One layer at a time: a reconstruction is as large as its input.
        layers = zip(k.split(1), v.split(1))
        energies = [reference(*(reconstruct(x, alpha, high_pass) for x in pair)) for pair in layers]
        return torch.cat(energies)
    return energy_triton(reconstruct(k, alpha, high_pass), reconstruct(v, alpha, high_pass))
