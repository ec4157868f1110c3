"""Two ranks measure the same prompts in step, and decide alike by the first one's figures."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from test_engine import request  # noqa: E402
from test_no_host_waits import served  # noqa: E402
from test_own_stand_ins import prompt, see  # noqa: E402
from test_ranks import RANKS, split  # noqa: E402
from test_ranks_on_disk import Group  # noqa: E402

from canopy_chunks import stand_in_trial  # noqa: E402
from canopy_chunks import stand_ins as rule  # noqa: E402
from canopy_chunks.model import from_transformers  # noqa: E402
from canopy_chunks.server import model_view  # noqa: E402
from support.chunk_models import build  # noqa: E402
from support.gloo_ranks import on_ranks  # noqa: E402

PROMPTS = 3


class AgreeingGroup(Group):
    def broadcast_object(self, mine):
        every = [mine]
        dist.broadcast_object_list(every)
        return every[0]


def trial(model, patch: pytest.MonkeyPatch, off: float = 0.0):
    """What was measured, what came of it, and where a request's chunks are to be found then."""
    patch.setattr(rule, "CANDIDATE_PROMPTS", 2)
    patch.setattr(rule, "LOOKS", (PROMPTS,))
    real = stand_in_trial.divergence
    patch.setattr(stand_in_trial, "divergence", lambda *about: real(*about) + off)
    engine = served(model, patch, lambda x: x, encode="standin", stand_in="corpus", ratio=0.2)
    see(engine, (1, 2, 3), (1, 2, 4))
    for i in range(PROMPTS):
        see(engine, (5 + i, 6 + i, 7 + i))
        while engine.has_idle_work:
            engine.idle_piece()
    (state,) = engine.stand_ins.stats()["tenants"]
    kl = list(engine.stand_ins.tenants[None].kl)
    keys = engine.new_request(request(*prompt((3, 5, 6)))).keys
    return kl, {k: v for k, v in state.items() if k != "tenant"}, keys, engine.counts["fallbacks"]


def one_rank(rank: int):
    patch = pytest.MonkeyPatch()
    patch.setattr(model_view, "_group", lambda: AgreeingGroup(rank))
    # what a rank would find by itself is made to differ: it does not count
    return trial(split(from_transformers(build("llama")), rank), patch, off=0.5 * rank)


def test_ranks_decide_alike_and_measure_what_the_whole_model_does(
    llama, tmp_path, monkeypatch
) -> None:
    found = on_ranks(RANKS, one_rank, tmp_path)
    assert found[0] == found[1]
    kl, state, _, fallbacks = found[0]
    assert fallbacks == 0
    assert state["measured"] == PROMPTS
    whole, same, *_ = trial(llama, monkeypatch)
    for ours, theirs in zip(kl, whole, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert same["stand_in"] == state["stand_in"]
