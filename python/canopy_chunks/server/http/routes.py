"""``DELETE /canopy/documents``: delete all documents of a tenant, and all KV of its prompts.

As in SGLang's requests, ``extra_key`` and ``cache_salt`` name the tenant: in the query, or in
headers.
"""

from __future__ import annotations

from typing import Any

from sglang_canopy.request import access
from sglang_canopy.request.sent import tenant_fields
from sglang_canopy.tenant import tenant_of
from sglang_canopy.wire.messages import CHUNKS, send


def add_routes() -> None:
    """Hook before ``launch_server``: add the route to SGLang's."""
    from sglang.srt.entrypoints.http_server import app

    access.add_change_route(app, "DELETE", "/canopy/documents", delete)


async def delete(request: Any) -> dict[str, Any]:
    """Delete the requesting tenant's documents in every scheduler."""
    from sglang.srt.entrypoints.http_server import get_global_state

    manager = get_global_state().tokenizer_manager
    tenant = tenant_of(**tenant_fields(request))
    manager.auto_create_handle_loop()
    answers = await send(manager, CHUNKS, tenant or "")
    return {"deleted": any(bool(one.updated) for one in answers)}
