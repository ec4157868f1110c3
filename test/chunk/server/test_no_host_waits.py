"""A fused step never waits for the device, and its choices and placements equal those on a CPU."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from comparators.plain_model import PlainModel  # noqa: E402
from comparators.weights import random_model  # noqa: E402
from test_encoder_and_packing import batch_of  # noqa: E402
from test_windows import Worker  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

from canopy_chunks.fuse.encode import encode  # noqa: E402
from canopy_chunks.fuse.model import Model  # noqa: E402
from canopy_chunks.fuse.selectors import frequency  # noqa: E402
from canopy_chunks.server import engine as engines  # noqa: E402
from canopy_chunks.server import forward as forwards  # noqa: E402
from canopy_chunks.server.engine import ChunkEngine  # noqa: E402
from canopy_chunks.server.model_view import ServerRope  # noqa: E402
from canopy_chunks.server.options import Options  # noqa: E402
from canopy_chunks.store.shape import Shape  # noqa: E402
from canopy_kernel import attention, rope_scatter  # noqa: E402
from support.chunk_engine import (  # noqa: E402
    LENGTH,
    NO_FILES,
    NO_STORAGE,
    SYSTEM,
    Tokenizer,
    know_head,
    prompt,
    request,
)
from support.queued import queued  # noqa: E402
from support.separate_device import DEVICE, HostSync, SeparateDevice, There, inside  # noqa: E402

SLOTS = 400


def moved(model, device: SeparateDevice):
    """The model with its weights on the separate device."""

    def put(x):
        return device.put(x) if isinstance(x, torch.Tensor) else x

    def all_of(part):
        names = [f.name for f in dataclasses.fields(part)]
        return dataclasses.replace(part, **{n: put(getattr(part, n)) for n in names})

    layers = tuple(all_of(layer) for layer in model.layers)
    return dataclasses.replace(all_of(model), layers=layers, rope=all_of(model.rope))


def kernels_on(monkeypatch) -> list[tuple[int, int]]:
    """Replace kernels by their references, which read the device's numbers as kernels do.

    Return (tensors, layers) of each launch that writes reused KV.
    """
    launches: list[tuple[int, int]] = []
    real = attention.reference

    def attend(q, k, v, rows, scale, backend="auto"):
        seen = dataclasses.replace(
            rows, **{f.name: inside(getattr(rows, f.name)) for f in dataclasses.fields(rows)}
        )
        return There(real(*map(inside, (q, k, v)), seen, scale))

    monkeypatch.setattr(attention, "sparse_prefill", attend)

    def run(work, first=0, end=None) -> None:
        end = len(work.k_pools) if end is None else end
        launches.append((len(work.keys), end - first))
        numbers = {
            f.name: tree_map(inside, getattr(work, f.name))
            for f in dataclasses.fields(work)
            if f.name != "_pieces"
        }
        rope_scatter.LayersScatter(**numbers).reference(first, end)

    monkeypatch.setattr(rope_scatter.LayersScatter, "run", run)
    real_energy = frequency.lowpass_energy

    def energy(k, v, *how):
        found = real_energy(inside(k), inside(v), *how)
        return There(found) if isinstance(k, There) else found

    monkeypatch.setattr(frequency, "lowpass_energy", energy)
    return launches


def served(model, monkeypatch, put, **options) -> ChunkEngine:
    """An engine over a pool of garbage; ``put`` moves tensors to the model's device."""
    monkeypatch.setattr(engines.model_view, "served_model", lambda *_: model)
    shape, make = model.shape, torch.Generator().manual_seed(9)
    size = (shape.layers, SLOTS, shape.kv_heads, shape.head_dim)
    keys, values = (torch.randn(size, generator=make) for _ in range(2))
    keys, values = [put(x.clone()) for x in keys], [put(x.clone()) for x in values]
    layers = [
        SimpleNamespace(self_attn=SimpleNamespace(attn=SimpleNamespace(layer_id=i)))
        for i in range(shape.layers)
    ]
    pool = SimpleNamespace(get_key_buffer=lambda i: keys[i], get_value_buffer=lambda i: values[i])
    runner = SimpleNamespace(
        attn_backend=SimpleNamespace(canopy_plan=None),
        model_config=NO_FILES,
        server_args=NO_STORAGE,
        token_to_kv_pool=pool,
        model=SimpleNamespace(model=SimpleNamespace(layers=layers)),
    )
    engine = ChunkEngine(runner, Options(memory_mb=64, **options), Tokenizer())
    runner.keys, runner.values = keys, values
    runner.canopy_chunks = engine
    return engine


def step_of(engine: ChunkEngine, ids, chunks, put, window: int | None = None):
    """Prepare a window of a prompt with known chunks; return the request, its rows and slots."""
    out, bounds = prompt(ids, (2, 0, 1))
    req = request(
        out, bounds, rid="r", full_untruncated_fill_ids=out, customized_info=None,
    )  # fmt: skip
    for chunk in chunks:
        engine.library.store.put(chunk, engine.new_request(req).salt)
    queued(engine, req)
    batch = batch_of([(0, window or len(out))])
    table = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))[None, : len(out)]
    batch.out_cache_loc = put(table[0, : window or len(out)].clone())
    for name in ("seq_lens", "req_pool_indices", "input_ids"):
        setattr(batch, name, put(getattr(batch, name)))
    mode = SimpleNamespace(
        is_decode=lambda: False, is_extend_without_speculative=lambda: True, is_mixed=lambda: False
    )
    batch.reqs, batch.forward_mode, batch.hicache_consumer_index = [req], mode, -1
    engine.runner.req_to_token_pool = SimpleNamespace(req_to_token=put(table.clone()))
    return req, batch, table[0]


def run(engine: ChunkEngine, batch, monkeypatch) -> list[torch.Tensor]:
    """Run the server's step without SGLang's forward; return the rows."""
    ran, worker = [], Worker(engine, monkeypatch)
    engine.runner.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=lambda i: engine.runner.keys[i],
        get_value_buffer=lambda i: engine.runner.values[i],
    )

    def original(_, run):
        plan = worker.model_runner.attn_backend.canopy_plan
        assert run.input_ids.shape == plan.positions.shape == run.out_cache_loc.shape
        q = torch.zeros(len(plan.positions), 4, 32, device=plan.positions.device)
        for k, v in zip(engine.runner.keys, engine.runner.values):
            plan.attend(q, k[:, None], v[:, None], 1.0)
        ran.append(plan.positions)

    forwards.forward(original, worker, batch)
    return ran


@pytest.fixture
def chunks(llama, ids):
    starts = range(SYSTEM, SYSTEM + 3 * LENGTH, LENGTH)
    return [encode(llama, ids[a : a + LENGTH].tolist(), ids[:SYSTEM].tolist()) for a in starts]


@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_a_fused_step_waits_for_nothing(llama, ids, chunks, monkeypatch, selector) -> None:
    plain = served(llama, monkeypatch, lambda x: x, selector=selector)
    req, batch, _ = step_of(plain, ids, chunks, lambda x: x)
    (want,) = run(plain, batch, monkeypatch)
    device = SeparateDevice()
    launches = kernels_on(monkeypatch)
    engine = served(moved(llama, device), monkeypatch, device.put, selector=selector)
    with device:
        there, batch, row = step_of(engine, ids, chunks, device.put)
        (rows,) = run(engine, batch, monkeypatch)
    assert engine.counts["fallbacks"] == 0
    assert there.canopy_chunks.fused
    assert inside(rows).tolist() == want.tolist()
    assert launches == [(1, llama.shape.layers)], "one launch, for all and all layers"
    reused = torch.ones(len(row), dtype=torch.bool)
    reused[want] = False
    for mine, theirs in zip(
        (*engine.runner.keys, *engine.runner.values), (*plain.runner.keys, *plain.runner.values)
    ):
        torch.testing.assert_close(
            inside(mine)[row[reused]], theirs[row[reused]], atol=1e-5, rtol=1e-5
        )
    (report,) = there.customized_info["canopy_chunks"]
    (known,) = req.customized_info["canopy_chunks"]
    with device:  # when the forward is done, before the answer is sent
        there.canopy_chunks.finish_report()
    assert report["reused"] == report["reused_host"] == known["reused_host"]
    assert report["recomputed"] == known["recomputed"]


@pytest.mark.parametrize("selector", ["question", "frequency"])
def test_encoding_waits_for_nothing(llama, ids, monkeypatch, selector) -> None:
    """After a normal prefill the first document is taken from the pool, and the others are encoded piece
    by piece, scored and stored."""
    out, bounds = prompt(ids)

    def encoded(engine: ChunkEngine, put) -> list[tuple[str, ...]]:
        req = request(out, bounds)
        state = engine.new_request(req)
        know_head(engine, state)
        engine.encode_missing(req, state, put(torch.arange(5, 5 + len(out))))
        while engine.has_idle_work:
            engine.work_when_idle()
        assert engine.library.failures == 0
        assert engine.library.encoder.encoded_chunks == 3
        return state.keys

    def keep(x):
        return x

    plain = served(llama, monkeypatch, keep, selector=selector)
    wanted = encoded(plain, keep)
    kernels_on(monkeypatch)
    device = SeparateDevice()
    with device:  # the store's own tensors too
        engine = served(moved(llama, device), monkeypatch, device.put, selector=selector)
        assert encoded(engine, device.put) == wanted
    for key, *_ in wanted:
        mine, theirs = (e.library.store.look(key) for e in (engine, plain))
        for a, b in ((mine.raw_k, theirs.raw_k), (mine.v, theirs.v)):
            torch.testing.assert_close(inside(a), b, atol=2e-5, rtol=1e-4)
        assert list(mine.scores) == list(theirs.scores)
        for name in theirs.scores:
            torch.testing.assert_close(mine.scores[name], theirs.scores[name])


class OfKernels(Model):
    """A model on the separate device that counts the kernels that SGLang's layers launch on CUDA: two
    norms, a rotation, an activation and four products. It does not check for waits inside them."""

    device, dtype, ranks, launched = DEVICE, torch.float32, None, 0

    def __init__(self, plain: PlainModel, longest: int) -> None:
        self.plain, self.shape, self.identity = plain, plain.shape, plain.identity
        self.rope = ServerRope(There(plain.rope.table(torch.arange(longest))))

    def forward(self, ids, positions, attention):
        def attend(layer, q, k, v):
            self.launched += 3  # norm, product, rotation
            attended = inside(attention(layer, *map(There, (q, k, v))))
            self.launched += 5
            return attended

        attend.kept = None
        return There(self.plain.forward(inside(ids), inside(positions), attend))

    def logits(self, hidden):
        raise AssertionError("a step needs none")


@pytest.mark.parametrize(
    ("selector", "own", "layers"), [("question", 140, 179), ("frequency", 15, 0)]
)
def test_a_fused_step_of_32_layers_launches_no_more_than_its_budget(
    ids, monkeypatch, selector, own, layers
) -> None:
    """own: our operations and kernels, without SGLang's forward of the chosen rows; layers: kernels of
    SGLang's layers that the probe runs."""
    model = random_model(Shape(32, 4, 2, 32, 64, 300, 1e-5), 64)
    starts = range(SYSTEM, SYSTEM + 3 * LENGTH, LENGTH)
    chunks = [encode(model, ids[a : a + LENGTH].tolist(), ids[:SYSTEM].tolist()) for a in starts]
    device, there = SeparateDevice(), OfKernels(model, SLOTS)
    launches, attended, attend = kernels_on(monkeypatch), [], attention.sparse_prefill
    monkeypatch.setattr(attention, "sparse_prefill", lambda *a: attended.append(a) or attend(*a))
    engine = served(there, monkeypatch, device.put, selector=selector)
    with device:
        _, batch, _ = step_of(engine, ids, chunks, device.put)
        device.operations.clear()
        run(engine, batch, monkeypatch)
    assert engine.counts["fallbacks"] == 0
    assert there.launched == layers
    probes = len(attended) - model.shape.layers  # the others are inside the forward
    assert sum(device.operations.values()) + len(launches) + probes <= own, device.operations


def test_the_device_of_these_tests_refuses_to_be_waited_for() -> None:
    device = SeparateDevice()
    x = device.put(torch.arange(4))
    waits = [
        lambda: int(x[0]), lambda: bool(x[0]), lambda: x[0].item(), lambda: x.cpu(),
        lambda: x[x > 1], lambda: x.nonzero(), lambda: torch.equal(x, x), lambda: x.unique(),
        lambda: torch.ones(2).to(DEVICE), lambda: torch.tensor([1], device=DEVICE),
        lambda: x[torch.tensor([1])],
    ]  # fmt: skip
    with device:
        for wait in waits:
            with pytest.raises(HostSync):
                wait()
        for wait in (x.tolist, x.numpy):
            with pytest.raises(RuntimeError, match="not supported"):
                wait()
        assert inside(x + 1).tolist() == [1, 2, 3, 4]
        torch.ones(2).to(DEVICE, non_blocking=True)
    assert device.copied == {"to device": 8}


@contextlib.contextmanager
def waits_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def watched_steps(strict, engine: ChunkEngine, ids, chunks, put, monkeypatch):
    """Run two steps and return the last request. The first compiles kernels, under ``strict`` only: its
    set-up copies from pageable memory, which waits."""
    for _ in range(2):
        req, batch, _ = step_of(engine, ids, chunks, put)
        with strict():
            run(engine, batch, monkeypatch)
    assert engine.counts["fallbacks"] == 0
    assert req.canopy_chunks.fused
    return req


def test_a_watched_step_warms_up_before_waits_are_errors(llama, ids, chunks, monkeypatch) -> None:
    """The test below, with recorded copies in place of a device."""
    device, under_way = SeparateDevice(), []
    kernels_on(monkeypatch)

    @contextlib.contextmanager
    def strict():
        under_way.append(True)
        with device:
            yield
        under_way.clear()

    def put(x):
        assert not under_way, "a copy that waits, where waits are errors"
        return device.put(x)

    engine = served(moved(llama, device), monkeypatch, put)
    watched_steps(strict, engine, ids, chunks, put, monkeypatch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_itself_sees_no_wait_in_a_fused_step(llama, ids, chunks, monkeypatch) -> None:
    def put(x):
        return x.cuda() if isinstance(x, torch.Tensor) else x

    there = SimpleNamespace(put=put)
    engine = served(moved(llama, there), monkeypatch, put)
    watched_steps(waits_are_errors, engine, ids, chunks, put, monkeypatch)
