"""CacheTune (arXiv 2605.24022): its figures and tables with SmolLM2-135M-Instruct on a CPU."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "chunk"))  # the comparators
