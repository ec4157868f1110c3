"""Documents' memory is reserved before the KV pool is sized, and a prompt that needs more runs normally."""

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
from canopy_documents.server.options import AUTOMATIC_PROMPT_TOKENS, ReuseOptions
from canopy_documents.server.plan import PromptSlots, choose_tokens
from canopy_documents.server.start import reserved_memory
from canopy_documents.store.chunk import Chunk, PlacedChunk
from canopy_documents.store.store import ChunkStore
from support import document_engine
from support.worker import run_in_scheduler_process

PROMPT_TOKENS, WINDOW_TOKENS, DOCUMENT_TOKENS, TAIL_TOKENS = 6000, 1000, 500, 100


class PeakMemory(TorchDispatchMode):
    """While entered, tracks the bytes of new tensors; ``peak_bytes``: the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = self.peak_bytes = 0
        self.storages: set[int] = set()
        self.earlier_storages: set[int] = set()  # allocated before it was entered

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for arg in tree_leaves((args, kwargs)):
            if isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata not in self.storages:
                self.earlier_storages.add(arg.untyped_storage()._cdata)
        outputs = func(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, torch.Tensor):
                self._count(output.untyped_storage())
        return outputs

    def _count(self, storage) -> None:
        if storage._cdata in self.storages | self.earlier_storages:
            return
        self.storages.add(storage._cdata)
        self.current_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        weakref.finalize(storage, self._subtract, storage._cdata, storage.nbytes())

    def _subtract(self, storage_id: int, nbytes: int) -> None:
        self.storages.discard(storage_id)
        self.current_bytes -= nbytes


@pytest.fixture
def runner(llama):
    """A pool of ``PROMPT_TOKENS + 1`` slots, as a model runner has it."""
    shape = llama.shape
    pools = torch.zeros(2, shape.layers, PROMPT_TOKENS + 1, shape.kv_heads, shape.head_dim)
    return document_engine.pool_runner(shape, *pools)


@pytest.fixture
def documents(llama):
    """Documents with random KV throughout a prompt of ``PROMPT_TOKENS``."""
    shape = llama.shape
    dims = (shape.layers, DOCUMENT_TOKENS, shape.kv_heads, shape.head_dim)
    starts = range(TAIL_TOKENS, PROMPT_TOKENS - TAIL_TOKENS - DOCUMENT_TOKENS, DOCUMENT_TOKENS)
    chunks = [Chunk((1,) * DOCUMENT_TOKENS, torch.randn(dims), torch.randn(dims)) for _ in starts]
    return tuple(PlacedChunk(chunk, start) for chunk, start in zip(chunks, starts))


@pytest.mark.parametrize("window", [WINDOW_TOKENS, PROMPT_TOKENS])
def test_planning_takes_no_more_than_the_reserved_memory(llama, runner, documents, window) -> None:
    ids, row = torch.ones(PROMPT_TOKENS, dtype=torch.long), torch.arange(1, PROMPT_TOKENS + 1)
    with PeakMemory() as memory:
        slots = PromptSlots(ids, row[:window], 0, documents)
        choose_tokens(llama, runner, slots, make_selector("question"), 0.15, [])
    reserved = reserved_memory(llama.shape, 4, PROMPT_TOKENS, 0)
    assert memory.peak_bytes > reserved.total_bytes / 20, "nothing was measured"
    assert memory.peak_bytes <= reserved.total_bytes
    if window < PROMPT_TOKENS:  # a cache of the whole prompt, in addition to the pool
        assert memory.peak_bytes > PROMPT_TOKENS * llama.shape.kv_elements_per_token * 4


def test_the_reserved_memory_covers_an_encoding_during_planning(llama, runner, documents):
    ids, row = torch.ones(PROMPT_TOKENS, dtype=torch.long), torch.arange(1, PROMPT_TOKENS + 1)
    store = ChunkStore("m", 1 << 30)
    encoder = BackgroundEncoder(llama, store)
    with PeakMemory() as memory:
        encoder.enqueue([1] * 1500, [2] * 500, "")
        encoder.step()
        slots = PromptSlots(ids, row[:WINDOW_TOKENS], 0, documents)
        choose_tokens(llama, runner, slots, make_selector("question"), 0.15, [])
    assert memory.peak_bytes <= reserved_memory(llama.shape, 4, PROMPT_TOKENS, 0).total_bytes


def test_rows_outside_documents_are_run_in_pieces_with_the_same_scores(
    llama, runner, documents, monkeypatch
) -> None:
    ids = torch.randint(0, 300, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(3))
    row = torch.arange(1, PROMPT_TOKENS + 1)
    later_documents = documents[6:]  # without six documents' tokens and the first tokens

    def choose_rows():
        slots = PromptSlots(ids, row, 0, later_documents)
        chosen, _ = choose_tokens(llama, runner, slots, make_selector("question"), 0.15, [])
        return chosen.rows().tolist()

    expected = choose_rows()
    monkeypatch.setattr(question, "PIECE_ROWS", 700)
    row_counts = []
    probe_rows = question.row_forward.probe_rows
    monkeypatch.setattr(
        question.row_forward,
        "probe_rows",
        lambda *args, **kwargs: row_counts.append(len(args[1])) or probe_rows(*args, **kwargs),
    )
    assert choose_rows() == expected
    assert row_counts[:-1] == [700] * 4
    assert max(row_counts) <= 700 + TAIL_TOKENS + DOCUMENT_TOKENS


@pytest.mark.parametrize(
    ("option", "context", "longest"),
    [(None, 8192, 8192), (None, 1 << 17, AUTOMATIC_PROMPT_TOKENS), (32768, 1 << 17, 32768),
     (32768, 8192, 8192)],
)  # fmt: skip
def test_the_longest_prompt_is_the_option_or_the_models_context(option, context, longest) -> None:
    assert ReuseOptions(prompt_tokens=option).max_prompt_tokens(context) == longest


@pytest.fixture
def budget(llama, monkeypatch):
    """``budget(free_bytes, device, **options)``: the bytes that remain for SGLang's KV pool."""
    monkeypatch.setattr(start, "served_shape", lambda causal_lm, config: llama.shape)

    def remaining_bytes(free_bytes: int, device: str = "cuda", **options) -> int:
        configurator = SimpleNamespace(
            model=None,
            model_config=SimpleNamespace(hf_config=None, context_len=4096),
            model_dtype=torch.bfloat16,
            device=device,
            server_args=SimpleNamespace(**{ATTRIBUTE: ReuseOptions(**options)}),
        )
        return start.pool_budget(lambda _, size: size, configurator, free_bytes)

    return remaining_bytes


def test_tiers_count_if_they_share_the_pools_memory(budget) -> None:
    free_bytes = 4 << 30
    reserved_bytes = free_bytes - budget(free_bytes)
    assert free_bytes - budget(free_bytes, "cpu", memory_mb=1124) == reserved_bytes + (1124 << 20)
    assert free_bytes - budget(free_bytes, memory_mb=3000) == reserved_bytes
    assert free_bytes - budget(free_bytes, prompt_tokens=2048) < reserved_bytes


def test_a_server_without_enough_memory_stops_and_reports_sizes(budget) -> None:
    with pytest.raises(SystemExit, match=r"800 for documents.*only 700 MiB are.*prompt_tokens"):
        budget(700 << 20, "cpu", memory_mb=800)


@pytest.mark.long
def test_sglangs_pool_is_smaller_by_the_reserved_memory(tiny_model) -> None:
    flags = ("--canopy-documents", "memory_mb=100,prompt_tokens=512")
    pools = run_in_scheduler_process("served_rows:pool_sizes", tiny_model, *flags, timeout_s=400)
    assert pools["on"] == 1000
    assert pools["off"] > 3000, "the reserved memory is more than that"
    assert "only 64 MiB are free" in pools["end"]
