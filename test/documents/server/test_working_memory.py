"""Chunk reuse states its memory before the KV pool is sized. A prompt that would need more runs
normally."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from canopy_documents import ATTRIBUTE
from canopy_documents.fuse.background_encoder import BackgroundEncoder
from canopy_documents.fuse.selectors import make_selector, question
from canopy_documents.server import start
from canopy_documents.server.options import AUTOMATIC_PROMPT_TOKENS, Options
from canopy_documents.server.plan import PromptSlots, choose_tokens
from canopy_documents.server.start import working_memory
from canopy_documents.store.chunk import Chunk, Placed
from canopy_documents.store.store import ChunkStore
from support import document_engine
from support.worker import run_in_scheduler_process

TOKENS, WINDOW, CHUNK, TAIL = 6000, 1000, 500, 100


class Peak(TorchDispatchMode):
    """The most bytes of tensors made while entered that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()
        self.before: set[int] = set()  # what was there before, and stays

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor) and given.untyped_storage()._cdata not in self.seen:
                self.before.add(given.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor):
                self._count(made.untyped_storage())
        return out

    def _count(self, storage) -> None:
        if storage._cdata in self.seen | self.before:
            return
        self.seen.add(storage._cdata)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, name: int, size: int) -> None:
        self.seen.discard(name)
        self.now -= size


@pytest.fixture
def runner(llama):
    """A pool of ``TOKENS`` slots, as a model runner has it."""
    shape = llama.shape
    pools = torch.zeros(2, shape.layers, TOKENS + 1, shape.kv_heads, shape.head_dim)
    return document_engine.pool_runner(shape, *pools)


@pytest.fixture
def placed(llama):
    """Documents all through a prompt of ``TOKENS``, of any KV."""
    shape = llama.shape
    size = (shape.layers, CHUNK, shape.kv_heads, shape.head_dim)
    starts = range(TAIL, TOKENS - TAIL - CHUNK, CHUNK)
    every = [Chunk((1,) * CHUNK, torch.randn(size), torch.randn(size)) for _ in starts]
    return tuple(Placed(chunk, at) for chunk, at in zip(every, starts))


@pytest.mark.parametrize("window", [WINDOW, TOKENS])
def test_planning_takes_no_more_than_is_set_aside(llama, runner, placed, window) -> None:
    ids, row = torch.ones(TOKENS, dtype=torch.long), torch.arange(1, TOKENS + 1)
    with Peak() as peak:
        slots = PromptSlots(ids, row[:window], 0, placed)
        choose_tokens(llama, runner, slots, make_selector("question"), 0.15, [])
    set_aside = working_memory(llama.shape, 4, TOKENS, 0)
    assert peak.most > set_aside.total / 20, "nothing was measured"
    assert peak.most <= set_aside.total
    if window < TOKENS:  # a cache of the whole prompt, in addition to the pool
        assert peak.most > TOKENS * llama.shape.kv_elements_per_token * 4


def test_a_document_that_is_encoded_while_a_prompt_is_planned_has_room_too(llama, runner, placed):
    ids, row = torch.ones(TOKENS, dtype=torch.long), torch.arange(1, TOKENS + 1)
    store = ChunkStore("m", 1 << 30)
    encoder = BackgroundEncoder(llama, store)
    with Peak() as peak:
        encoder.enqueue([1] * 1500, [2] * 500, "")
        encoder.step()
        slots = PromptSlots(ids, row[:WINDOW], 0, placed)
        choose_tokens(llama, runner, slots, make_selector("question"), 0.15, [])
    assert peak.most <= working_memory(llama.shape, 4, TOKENS, 0).total


def test_rows_outside_documents_are_run_in_pieces_with_the_same_scores(
    llama, runner, placed, monkeypatch
) -> None:
    ids = torch.randint(0, 300, (TOKENS,), generator=torch.Generator().manual_seed(3))
    row = torch.arange(1, TOKENS + 1)
    later_documents = placed[6:]  # without six documents' tokens and the first tokens

    def chosen():
        slots = PromptSlots(ids, row, 0, later_documents)
        found, _ = choose_tokens(llama, runner, slots, make_selector("question"), 0.15, [])
        return found.rows().tolist()

    whole = chosen()
    monkeypatch.setattr(question, "PIECE_ROWS", 700)
    ran = []
    probe_rows = question.engine.probe_rows
    monkeypatch.setattr(
        question.engine, "probe_rows", lambda *a, **k: ran.append(len(a[1])) or probe_rows(*a, **k)
    )
    assert chosen() == whole
    assert ran[:-1] == [700] * 4
    assert max(ran) <= 700 + TAIL + CHUNK


@pytest.mark.parametrize(
    ("option", "context", "longest"),
    [(None, 8192, 8192), (None, 1 << 17, AUTOMATIC_PROMPT_TOKENS), (32768, 1 << 17, 32768),
     (32768, 8192, 8192)],
)  # fmt: skip
def test_the_longest_prompt_is_as_given_or_as_the_model_has_it(option, context, longest) -> None:
    assert Options(prompt_tokens=option).longest_prompt(context) == longest


@pytest.fixture
def budget(llama, monkeypatch):
    """``budget(bytes, **options)``: what SGLang is left of free bytes, with a small model."""
    monkeypatch.setattr(start, "served_shape", lambda inner, config: llama.shape)

    def left(free: int, device: str = "cuda", **options) -> int:
        configurator = SimpleNamespace(
            model=None,
            model_config=SimpleNamespace(hf_config=None, context_len=4096),
            model_dtype=torch.bfloat16,
            device=device,
            server_args=SimpleNamespace(**{ATTRIBUTE: Options(**options)}),
        )
        return start.pool_budget(lambda _, size: size, configurator, free)

    return left


def test_tiers_count_if_they_share_the_pools_memory(budget) -> None:
    free = 4 << 30
    none = free - budget(free)
    assert free - budget(free, "cpu", memory_mb=1124) == none + (1124 << 20)
    assert free - budget(free, memory_mb=3000) == none, "the host's memory is not the device's"
    assert free - budget(free, prompt_tokens=2048) < none


def test_a_server_without_enough_memory_stops_and_reports_sizes(budget) -> None:
    with pytest.raises(
        SystemExit, match=r"800 for documents.*only 700 MiB are free.*prompt_tokens"
    ):
        budget(700 << 20, "cpu", memory_mb=800)


@pytest.mark.long
def test_sglangs_pool_is_smaller_by_the_reserved_memory(tiny_model) -> None:
    flags = ("--canopy-documents", "memory_mb=100,prompt_tokens=512")
    pools = run_in_scheduler_process("served_rows:pool_sizes", tiny_model, *flags, timeout_s=400)
    assert pools["on"] == 1000
    assert pools["off"] > 3000, "what was left out is more than that"
    assert "only 64 MiB are free" in pools["end"]
