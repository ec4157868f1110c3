"""No container of the HTTP process grows with new names: salts, conversations and ids of responses."""

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from canopy_documents.text.order import Orders
from canopy_documents.text.variants import Heads
from sglang_canopy.config.server_options import RequestOptions
from sglang_canopy.errors import CanopyError
from sglang_canopy.request.access import Refused
from sglang_canopy.server.http import entry
from sglang_canopy.server.http.explaining import ExplainRoute
from sglang_canopy.wire.hints import WaitingHints
from support.containers import count_entries, grown_containers

SLACK_ENTRIES = 16


async def answer_nothing(_message: str) -> list[Any]:
    return []


class HttpProcess:
    """The parts of an HTTP process that receive names from clients, whose ``now_s`` is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.loop = asyncio.new_event_loop()
        self.entry = entry.HttpState(RequestOptions())
        monkeypatch.setattr(entry, "http_state", self.entry)
        self.hints = WaitingHints()
        self.explaining = ExplainRoute(answer_nothing, None)
        self.orders, self.heads = Orders(64), Heads(max_heads=64)

    def serve(self, number: int) -> None:
        """Send a request of a new tenant on each route, a tenth of a second after the previous one."""
        self.now_s += 0.1
        tenant = f"t{number}"
        self._generate(number, tenant)
        hint = {"conversation": f"c{number}", "cache_salt": tenant, "over": True}
        with contextlib.suppress(CanopyError):  # the bound on waiting hints
            self.hints.add(hint, self.now_s)
        query = {"conversation": f"c{number}", "cache_salt": tenant}
        explain_request = SimpleNamespace(query_params=query, headers={})
        with contextlib.suppress(CanopyError, Refused):
            self.loop.run_until_complete(self.explaining(explain_request))
        self.orders.choose_order(number, ["one", "two"], tenant)
        self.heads.record_head(tenant, (number, number + 1))

    def _generate(self, number: int, tenant: str) -> None:
        body = {"user": f"u{number}"}
        request = SimpleNamespace(
            scope={"path": "/v1/responses"}, headers={}, json=lambda: self._body(body)
        )
        generate_request = SimpleNamespace(
            sampling_params={"custom_params": {"canopy_category": f"k{number}"}},
            rid=f"resp_{number}",
            extra_key=None,
            cache_salt=tenant,
            session_id=f"s{number}",
        )
        entry.stamp_request(generate_request, {"category": "chat", "turn": 1}, request)
        assert generate_request.sampling_params["custom_params"]["canopy"]["conversation"]

    @staticmethod
    async def _body(body: dict[str, Any]) -> dict[str, Any]:
        return body

    def count_entries(self) -> dict[str, int]:
        return count_entries(self.entry, self.hints, self.explaining, self.orders, self.heads)


@pytest.fixture
def process(monkeypatch) -> Iterator[HttpProcess]:
    http_process = HttpProcess(monkeypatch)
    yield http_process
    http_process.loop.close()


def test_no_container_of_the_http_process_grows_with_new_names(process) -> None:
    assert grown_containers(process, process.serve, 4_200, 4_500, 0.02, SLACK_ENTRIES) == {}
    # The sweep covers all containers: each has an entry.
    counts = process.count_entries()
    filled_classes = {name.partition(".")[0] for name, count in counts.items() if count}
    assert {"BoundedByTenant", "Orders"} <= filled_classes


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_container_of_the_http_process_grows_with_100_000_new_names(process) -> None:
    assert grown_containers(process, process.serve, 5_000, 100_000, 0.02, SLACK_ENTRIES) == {}
