"""Canopy: a workload-aware, tiered radix cache for SGLang.

Importing this package imports neither torch nor sglang: the policies, the traces and the
simulator work without a server. ``server/start/seams.py`` lists what is hooked in SGLang.
"""

__version__ = "0.1.0"

SGLANG_VERSION = "0.5.23"
"""The one version of sglang whose seams this release was written and tested against."""
