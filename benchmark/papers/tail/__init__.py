"""Tail-Optimized Caching (arXiv 2510.15152): its figures, tables and theorems, regenerated."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "traces"))  # synthetic traces and overlays
