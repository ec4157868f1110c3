"""Lines that the lease's summary takes out of a part's log."""

from __future__ import annotations

import json
from typing import Any


def result(name: str, **values: Any) -> None:
    """One line: what was measured, and its values."""
    print(f"RESULT {name} {json.dumps(values)}", flush=True)
