"""The agreement of the ranks of a server."""

from __future__ import annotations

import json
import time
from typing import Any


def agreed(client: Any, patience_s: float) -> dict[str, Any]:
    """Return the first rank's status once the other rank's is equal; each is updated once a second."""
    deadline = time.monotonic() + patience_s
    while True:
        (first,) = json.loads(client.get("/canopy/status"))["ranks"]
        (peer,) = first["peers"]
        if {k: peer[k] for k in first["agreement"]} == first["agreement"]:
            return first
        assert time.monotonic() < deadline, (peer, first["agreement"])
        time.sleep(0.2)
