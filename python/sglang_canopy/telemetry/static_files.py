"""Static files of the page; the page loads nothing from other servers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from sglang_canopy.errors import CanopyError

_FOLDER = Path(__file__).parent / "static"
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
FILES = ("index.html", "page.js", "page.css", "uPlot.iife.min.js", "uPlot.min.css")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Headers of every file. uPlot sets sizes as inline styles."""


@cache
def read_file(name: str) -> tuple[bytes, str]:
    """Return a file and its media type. Raises ``CanopyError`` for a name not in ``FILES``."""
    if name not in FILES:
        raise CanopyError(f"the page has no file {name!r:.60}")
    path = _FOLDER / name
    return path.read_bytes(), MEDIA_TYPES[path.suffix]
