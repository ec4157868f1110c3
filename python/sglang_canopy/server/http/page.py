"""``GET /canopy/ui``: the page, protected by the same key as its data."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_canopy.request import access
from sglang_canopy.telemetry.static_files import FILES, HEADERS, file

PATH = "/canopy/ui"


def add_page(app: Any, admin_api_key: str | None) -> None:
    """Add the page's routes. Its files share the path prefix of the routes that it reads."""
    access.add_read_route(app, "GET", PATH, partial(_file, "index.html"), admin_api_key)
    for name in FILES[1:]:
        access.add_read_route(app, "GET", f"/canopy/{name}", partial(_file, name), admin_api_key)


async def _file(name: str, _request: Any) -> Any:
    from starlette.responses import Response

    content, kind = file(name)
    return Response(content, media_type=kind, headers=HEADERS)
