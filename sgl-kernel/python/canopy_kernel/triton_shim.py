"""Triton, or stubs if it is not installed, so that the references can still be imported and run."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU without Triton: references and the blocked path need none

    class _Missing:
        def __getattr__(self, name: str) -> Any:
            return lambda *a, **k: a[0] if a else self

    triton = tl = _Missing()

__all__ = ["tl", "triton"]
