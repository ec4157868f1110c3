"""Whose HTTP request it is: the tenant's two fields, in the body, the query or the headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_canopy.errors import CanopyError

HEADERS = {"extra_key": "X-Canopy-Extra-Key", "cache_salt": "X-Canopy-Cache-Salt"}
"""A gateway names the tenant here; a body or query that names another is refused."""


def tenant_fields(request: Any, body: Mapping[str, Any] | None = None) -> dict[str, str | None]:
    """``extra_key`` and ``cache_salt`` of a Starlette request, for ``tenant_of``.

    Raises ``CanopyError`` where one is no string, or is given twice and differently.
    """
    found: dict[str, str | None] = {}
    for field, header in HEADERS.items():
        in_body = (body or {}).get(field)
        if not isinstance(in_body, str | None):
            raise CanopyError(f"{field} must be a string, as in the tenant's requests")
        places = (in_body, request.query_params.get(field), request.headers.get(header))
        given = {one for one in places if one}
        if len(given) > 1:
            raise CanopyError(
                f"{field} is given twice, and differently: in the body, the query and the header "
                f"{header} it must be the same; give it once"
            )
        found[field] = given.pop() if given else None
    return found
