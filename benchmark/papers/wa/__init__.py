"""KVCache Cache in the Wild (USENIX ATC 2025, arXiv 2506.02634), figure by figure."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "traces"))  # synthetic traces and overlays
