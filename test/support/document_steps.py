"""Steps of an engine of documents without SGLang's forward, on a CPU or an emulated device."""

import dataclasses
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_map

from canopy_documents.fuse.selectors import frequency
from canopy_documents.server import engine as engines
from canopy_documents.server import forward as forwards
from canopy_documents.server.engine import DocumentEngine
from canopy_documents.server.options import ReuseOptions
from canopy_kernel import attention, rope_scatter
from support.document_engine import Tokenizer, bare_runner, pool_runner, prompt, queue_req, request
from support.separate_device import DeviceTensor, SeparateDevice, unwrap

POOL_SLOTS = 400


def batch_of(row_ranges: list[tuple[int, int]]) -> SimpleNamespace:
    """An extend batch of requests, each with the start and end of its new tokens; request i has row i."""
    prompt_lengths = [end for _, end in row_ranges]
    slot_table = torch.arange(len(row_ranges) * 100).view(len(row_ranges), 100) + 7
    slots = torch.cat([slot_table[i, start:end] for i, (start, end) in enumerate(row_ranges)])
    new_tokens = sum(end - start for start, end in row_ranges)
    return SimpleNamespace(
        seq_lens=torch.tensor(prompt_lengths),
        seq_lens_cpu=torch.tensor(prompt_lengths),
        prefix_lens=[start for start, _ in row_ranges],
        extend_lens=[end - start for start, end in row_ranges],
        extend_num_tokens=new_tokens,
        extend_logprob_start_lens=[end - start for start, end in row_ranges],
        input_ids=torch.arange(new_tokens),
        out_cache_loc=slots,
        prefill_input_ids_cpu=None,
        req_pool_indices=torch.arange(len(row_ranges)),
        req_pool_indices_cpu=torch.arange(len(row_ranges)),
        table=slot_table,
    )


def extend(batch: SimpleNamespace, req) -> SimpleNamespace:
    """The batch as one of this request's prefill."""
    mode = SimpleNamespace(
        is_decode=lambda: False, is_extend_without_speculative=lambda: True, is_mixed=lambda: False
    )
    batch.reqs, batch.forward_mode, batch.hicache_consumer_index = [req], mode, -1
    return batch


class StepWorker:
    """A worker that records the rows of its forwards, and whether they were sampled from."""

    def __init__(self, engine, monkeypatch) -> None:
        self.model_runner = engine.runner
        self.forwards: list[tuple[list[int], bool]] = []
        engine.runner.canopy = engine
        engine.runner.token_to_kv_pool = None
        monkeypatch.setattr(forwards, "_run_without_sampling", self.record_rows)

    def record_rows(self, _runner, _batch, plan) -> None:
        self.forwards.append((plan.positions.tolist(), False))

    def set_hicache_consumer(self, index) -> None:
        pass

    def forward(self, batch):
        def original(worker, packed):
            plan = worker.model_runner.attn_backend.canopy.fused_attention
            rows = plan.positions if plan is not None else torch.arange(packed.extend_num_tokens)
            self.forwards.append((rows.tolist(), True))

        return forwards.forward(original, self, batch)


def move_model(model, device: SeparateDevice):
    """Return the model with its weights on the separate device."""

    def to_device(value):
        return device.put(value) if isinstance(value, torch.Tensor) else value

    def move_fields(part):
        names = [f.name for f in dataclasses.fields(part)]
        return dataclasses.replace(part, **{name: to_device(getattr(part, name)) for name in names})

    layers = tuple(move_fields(layer) for layer in model.layers)
    return dataclasses.replace(move_fields(model), layers=layers, rope=move_fields(model.rope))


def use_torch(monkeypatch) -> None:
    """Replace kernels by their references, which read the device's numbers as kernels do."""
    reference = attention.reference

    def attend(q, k, v, rows, scale, backend="auto"):
        host_rows = dataclasses.replace(
            rows, **{f.name: unwrap(getattr(rows, f.name)) for f in dataclasses.fields(rows)}
        )
        return DeviceTensor(reference(*map(unwrap, (q, k, v)), host_rows, scale))

    monkeypatch.setattr(attention, "sparse_prefill", attend)

    def run_reference(scatter, first_layer=0, end_layer=None) -> None:
        end_layer = len(scatter.k_pools) if end_layer is None else end_layer
        fields = {
            f.name: tree_map(unwrap, getattr(scatter, f.name))
            for f in dataclasses.fields(scatter)
            if f.name != "_transfers"
        }
        rope_scatter.LayersScatter(**fields).reference(first_layer, end_layer)

    monkeypatch.setattr(rope_scatter.LayersScatter, "run", run_reference)
    real_energy = frequency.lowpass_energy

    def energy(k, v, *options):
        energies = real_energy(unwrap(k), unwrap(v), *options)
        return DeviceTensor(energies) if isinstance(k, DeviceTensor) else energies

    monkeypatch.setattr(frequency, "lowpass_energy", energy)


def pool_engine(model, monkeypatch, to_device, **options) -> DocumentEngine:
    """An engine over a pool of garbage; ``to_device`` moves tensors to the model's device."""
    monkeypatch.setattr(engines.model_view, "served_model", lambda *_: model)
    shape, generator = model.shape, torch.Generator().manual_seed(9)
    pool_shape = (shape.layers, POOL_SLOTS, shape.kv_heads, shape.head_dim)
    keys, values = (torch.randn(pool_shape, generator=generator) for _ in range(2))
    keys, values = [to_device(x.clone()) for x in keys], [to_device(x.clone()) for x in values]
    runner = pool_runner(shape, keys, values, **vars(bare_runner()))
    engine = DocumentEngine(runner, ReuseOptions(memory_mb=64, **options), Tokenizer())
    runner.keys, runner.values = keys, values
    runner.canopy = engine
    return engine


def set_up(engine: DocumentEngine, ids, chunks, to_device, window: int | None = None):
    """Prepare the first ``window`` tokens of a prompt with known chunks; return the request, its batch and its slots."""
    tokens, bounds = prompt(ids, (2, 0, 1))
    req = request(
        tokens, bounds, rid="r", full_untruncated_fill_ids=tokens, customized_info=None,
    )  # fmt: skip
    for chunk in chunks:
        engine.library.store.put(chunk, engine.new_request(req).salt)
    queue_req(engine, req)
    batch = batch_of([(0, window or len(tokens))])
    slot_table = torch.randperm(POOL_SLOTS, generator=torch.Generator().manual_seed(3))[None]
    slot_table = slot_table[:, : len(tokens)]
    batch.out_cache_loc = to_device(slot_table[0, : window or len(tokens)].clone())
    for name in ("seq_lens", "req_pool_indices", "input_ids"):
        setattr(batch, name, to_device(getattr(batch, name)))
    extend(batch, req)
    engine.runner.req_to_token_pool = SimpleNamespace(req_to_token=to_device(slot_table.clone()))
    return req, batch, slot_table[0]


def check_kv(engine: DocumentEngine, reference: DocumentEngine, slots) -> None:
    """Check that two engines' pools have the same KV in these slots."""
    buffers, expected_buffers = ((*r.keys, *r.values) for r in (engine.runner, reference.runner))
    for buffer, expected in zip(buffers, expected_buffers, strict=True):
        torch.testing.assert_close(unwrap(buffer)[slots], expected[slots], atol=1e-5, rtol=1e-5)


def run_step(engine: DocumentEngine, batch, monkeypatch) -> list[torch.Tensor]:
    """Run the server's step without SGLang's forward; return the positions of the rows of each layer."""
    positions_by_layer, worker = [], StepWorker(engine, monkeypatch)
    engine.runner.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=lambda i: engine.runner.keys[i],
        get_value_buffer=lambda i: engine.runner.values[i],
    )

    def original(_, packed):
        plan = worker.model_runner.attn_backend.canopy.fused_attention
        assert packed.input_ids.shape == plan.positions.shape == packed.out_cache_loc.shape
        q = torch.zeros(len(plan.positions), 4, 32, device=plan.positions.device)
        for k, v in zip(engine.runner.keys, engine.runner.values):
            plan.attend(q, k[:, None], v[:, None], 1.0)
        positions_by_layer.append(plan.positions)

    forwards.forward(original, worker, batch)
    return positions_by_layer
