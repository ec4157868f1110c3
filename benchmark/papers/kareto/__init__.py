"""Kareto (arXiv 2603.08739): its figures, table, algorithms and observations."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "traces"))  # synthetic traces and overlays
