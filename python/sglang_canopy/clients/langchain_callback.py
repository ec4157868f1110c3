"""LangChain and LangGraph: each outermost run is a session.

    model = ChatOpenAI(base_url=f"{URL}/v1", ..., http_client=http_client(), http_async_client=async_http_client())
    agent.invoke(task, config={"callbacks": [CanopyCallback(URL)]})

A graph called again with the same ``thread_id`` continues its conversation: pass ``ends=False``,
and end the conversation with ``Session(URL, THREAD).over()``.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler

from sglang_canopy.clients.session import Session


class CanopyCallback(BaseCallbackHandler):
    """Opens a session when a run without a parent starts, and ends it with the run.

    ``options``: keyword arguments of ``Session``.
    """

    run_inline = True
    """Run in the caller's thread and task, which hold the session's context variable."""

    def __init__(self, url: str, *, ends: bool = True, **options: Any) -> None:
        self.url, self.ends, self.options = url, ends, options
        self.last: Session | None = None
        """The session that ended last."""
        self._running: dict[UUID, Session] = {}

    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        if parent_run_id is None:
            thread = (metadata or {}).get("thread_id")
            session = Session(self.url, None if thread is None else str(thread), **self.options)
            self._running[run_id] = session.enter()

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **rest: Any) -> None:
        self._left(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **rest: Any) -> None:
        self._left(run_id)

    def _left(self, run_id: UUID) -> None:
        session = self._running.pop(run_id, None)
        if session is not None:
            self.last = session
            session.leave()
            if self.ends:
                session.over()
