"""Request traces: one record, one way to open any format, and the tools that make them."""

from sglang_canopy.trace.open import format_names, open_trace
from sglang_canopy.trace.record import TraceRequest

__all__ = ["TraceRequest", "format_names", "open_trace"]
