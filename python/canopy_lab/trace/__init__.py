"""Request traces: one record, one way to open any format, and the tools that make them."""

from canopy_lab.trace.open import format_names, open_trace
from canopy_lab.trace.record import TraceRequest

__all__ = ["TraceRequest", "format_names", "open_trace"]
