"""Steps of an engine of documents without SGLang's forward, on a CPU or an emulated device."""

import dataclasses
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_map

from canopy_documents.fuse.selectors import frequency
from canopy_documents.server import engine as engines
from canopy_documents.server import forward as forwards
from canopy_documents.server.engine import DocumentEngine
from canopy_documents.server.options import Options
from canopy_kernel import attention, rope_scatter
from support.document_engine import Tokenizer, bare_runner, pool_runner, prompt, queued, request
from support.separate_device import SeparateDevice, There, inside

SLOTS = 400


def batch_of(windows: list[tuple[int, int]]) -> SimpleNamespace:
    """An extend batch of requests with ``(prefix, length)``; request i has row i."""
    lengths = [n for _, n in windows]
    table = torch.arange(len(windows) * 100).view(len(windows), 100) + 7
    slots = torch.cat([table[i, p:n] for i, (p, n) in enumerate(windows)])
    total = sum(n - p for p, n in windows)
    return SimpleNamespace(
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        prefix_lens=[p for p, _ in windows],
        extend_lens=[n - p for p, n in windows],
        extend_num_tokens=total,
        extend_logprob_start_lens=[n - p for p, n in windows],
        input_ids=torch.arange(total),
        out_cache_loc=slots,
        prefill_input_ids_cpu=None,
        req_pool_indices=torch.arange(len(windows)),
        req_pool_indices_cpu=torch.arange(len(windows)),
        table=table,
    )


def extend(batch: SimpleNamespace, req) -> SimpleNamespace:
    """The batch as one of this request's prefill."""
    mode = SimpleNamespace(
        is_decode=lambda: False, is_extend_without_speculative=lambda: True, is_mixed=lambda: False
    )
    batch.reqs, batch.forward_mode, batch.hicache_consumer_index = [req], mode, -1
    return batch


class Worker:
    """A worker whose forwards are written down: rows, and whether they were sampled from."""

    def __init__(self, engine, monkeypatch) -> None:
        self.model_runner = engine.runner
        self.ran: list[tuple[list[int], bool]] = []
        engine.runner.canopy = engine
        engine.runner.token_to_kv_pool = None
        note = lambda worker, run, plan: self.ran.append((plan.positions.tolist(), False))  # noqa: E731
        monkeypatch.setattr(forwards, "_run_without_sampling", note)

    def set_hicache_consumer(self, index) -> None:
        pass

    def forward(self, batch):
        def original(worker, run):
            plan = worker.model_runner.attn_backend.canopy.plan
            rows = plan.positions if plan is not None else torch.arange(run.extend_num_tokens)
            self.ran.append((rows.tolist(), True))

        return forwards.forward(original, self, batch)


def moved(model, device: SeparateDevice):
    """The model with its weights on the separate device."""

    def put(x):
        return device.put(x) if isinstance(x, torch.Tensor) else x

    def all_of(part):
        names = [f.name for f in dataclasses.fields(part)]
        return dataclasses.replace(part, **{n: put(getattr(part, n)) for n in names})

    layers = tuple(all_of(layer) for layer in model.layers)
    return dataclasses.replace(all_of(model), layers=layers, rope=all_of(model.rope))


def kernels_on(monkeypatch) -> None:
    """Replace kernels by their references, which read the device's numbers as kernels do."""
    real = attention.reference

    def attend(q, k, v, rows, scale, backend="auto"):
        seen = dataclasses.replace(
            rows, **{f.name: inside(getattr(rows, f.name)) for f in dataclasses.fields(rows)}
        )
        return There(real(*map(inside, (q, k, v)), seen, scale))

    monkeypatch.setattr(attention, "sparse_prefill", attend)

    def run(work, first=0, end=None) -> None:
        end = len(work.k_pools) if end is None else end
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


def served(model, monkeypatch, put, **options) -> DocumentEngine:
    """An engine over a pool of garbage; ``put`` moves tensors to the model's device."""
    monkeypatch.setattr(engines.model_view, "served_model", lambda *_: model)
    shape, make = model.shape, torch.Generator().manual_seed(9)
    size = (shape.layers, SLOTS, shape.kv_heads, shape.head_dim)
    keys, values = (torch.randn(size, generator=make) for _ in range(2))
    keys, values = [put(x.clone()) for x in keys], [put(x.clone()) for x in values]
    runner = pool_runner(shape, keys, values, **vars(bare_runner()))
    engine = DocumentEngine(runner, Options(memory_mb=64, **options), Tokenizer())
    runner.keys, runner.values = keys, values
    runner.canopy = engine
    return engine


def step_of(engine: DocumentEngine, ids, chunks, put, window: int | None = None):
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
    extend(batch, req)
    engine.runner.req_to_token_pool = SimpleNamespace(req_to_token=put(table.clone()))
    return req, batch, table[0]


def same_kv(engine: DocumentEngine, other: DocumentEngine, slots) -> None:
    """Check that two engines' pools have the same KV in these slots."""
    mine, theirs = engine.runner, other.runner
    for a, b in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values)):
        torch.testing.assert_close(inside(a)[slots], b[slots], atol=1e-5, rtol=1e-5)


def run(engine: DocumentEngine, batch, monkeypatch) -> list[torch.Tensor]:
    """Run the server's step without SGLang's forward; return the rows."""
    ran, worker = [], Worker(engine, monkeypatch)
    engine.runner.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=lambda i: engine.runner.keys[i],
        get_value_buffer=lambda i: engine.runner.values[i],
    )

    def original(_, run):
        plan = worker.model_runner.attn_backend.canopy.plan
        assert run.input_ids.shape == plan.positions.shape == run.out_cache_loc.shape
        q = torch.zeros(len(plan.positions), 4, 32, device=plan.positions.device)
        for k, v in zip(engine.runner.keys, engine.runner.values):
            plan.attend(q, k[:, None], v[:, None], 1.0)
        ran.append(plan.positions)

    forwards.forward(original, worker, batch)
    return ran
