"""A digest of many values."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(values: Any) -> str:
    """SHA-256 of plain values (numbers, strings, lists), 16 hexadecimal digits of it."""
    text = json.dumps(values, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
