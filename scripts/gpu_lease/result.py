"""Lines that the lease's summary takes out of a part's log."""

from __future__ import annotations

import json
from typing import Any


def result(name: str, **values: Any) -> None:
    """Print a measurement and its values in one line."""
    print(f"RESULT {name} {json.dumps(values)}", flush=True)
