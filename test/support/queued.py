"""A request with documents, as it is in SGLang's queue."""

from types import SimpleNamespace
from typing import Any

from canopy_chunks.server import scheduler
from canopy_chunks.server.engine import ChunkEngine
from sglang_canopy.wire.attached import attached


def queued(engine: ChunkEngine, req: Any) -> Any:
    """The chunk state of ``req``, which is in the namespace of its KV."""
    state = attached(req).documents = engine.new_request(req)
    scheduler.request_queued(scheduler_of(engine), req)
    return state


def scheduler_of(engine: ChunkEngine) -> Any:
    """A scheduler with nothing but its engine."""
    runner = SimpleNamespace(canopy=engine)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
