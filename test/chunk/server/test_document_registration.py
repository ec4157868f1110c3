"""A document that is deleted while it is registered is neither found nor kept."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
from starlette.requests import Request

from canopy_chunks.server.http import entry, routes
from canopy_chunks.server.options import Options
from canopy_chunks.text.documents import Documents, document_name
from canopy_chunks.text.find import Finder, inner
from sglang_canopy.errors import CanopyError

IDS = list(range(100))
PROMPT = [7, 7, *IDS, 7, 7]
OPTIONS = Options(min_tokens=16, find="on")


class Manager:
    """SGLang's side of a registration: ``during`` runs while the document is encoded."""

    def __init__(self) -> None:
        self.server_args = SimpleNamespace(page_size=1)
        self.model_config = SimpleNamespace(vocab_size=1000, context_len=4096)
        self.messages: list[str] = []
        self.during: Any = None

    def auto_create_handle_loop(self) -> None:
        pass

    async def generate_request(self, _request: Any, _raw: Any) -> Any:
        self.messages.append("encode")
        if self.during is not None:
            await self.during()
        yield {}

    async def set_internal_state_communicator(self, asked: Any) -> list[Any]:
        await asyncio.sleep(0)
        self.messages += [key.split(":")[-3] for key in asked.server_args]
        return [SimpleNamespace(updated=True)]


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    monkeypatch.setattr(entry, "documents", Documents(share=1.0))
    monkeypatch.setattr(entry, "finder", Finder())
    monkeypatch.setattr(routes, "limits", routes.DocumentLimits())
    return Manager()


def request(method: str, body: bytes = b"", **path: str) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": method, "headers": headers, "query_string": b""}
    return Request({**scope, "path": "/canopy/chunks", "path_params": path}, receive)


async def register(manager: Manager) -> dict[str, Any]:
    body = json.dumps({"input_ids": IDS}).encode()
    return await routes.register(request("POST", body), manager, OPTIONS)


async def delete(manager: Manager) -> None:
    name = document_name(IDS, None)
    await routes.delete(request("DELETE", name=name), manager, OPTIONS)


def found() -> list[int]:
    return entry.finder.find(PROMPT, None, 8)


def test_a_registered_document_is_found(manager: Manager) -> None:
    answer = asyncio.run(register(manager))
    assert answer["id"] == document_name(IDS, None)
    assert found() == [4, 100]
    assert PROMPT[slice(*found())] == list(inner(tuple(IDS)))
    assert manager.messages == ["encode"]


def test_a_document_deleted_during_its_encoding_is_not_found_and_its_kv_is_deleted(
    manager: Manager,
) -> None:
    manager.during = lambda: delete(manager)
    with pytest.raises(CanopyError, match="deleted or displaced during its registration"):
        asyncio.run(register(manager))
    assert found() == []
    assert manager.messages[-1] == "delete"


def test_a_document_deleted_while_its_room_is_made_is_not_found(manager: Manager) -> None:
    entry.documents.removed.append(routes.Document(tuple(range(200, 300)), None))

    async def both() -> None:
        registration = asyncio.create_task(register(manager))
        while not entry.documents.of(None):
            await asyncio.sleep(0)
        await delete(manager)
        with pytest.raises(CanopyError, match="during its registration"):
            await registration

    asyncio.run(both())
    assert found() == []
    assert manager.messages[-1] == "delete"
