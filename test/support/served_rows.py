"""Rows that SGLang's own layers compute for the engine of documents: workers of tests."""

from collections.abc import Callable
from typing import Any

import torch

from canopy_documents.fuse import rows as engine
from canopy_documents.fuse.cache import dense_cache
from canopy_documents.server import model_view
from canopy_documents.server.start import working_memory
from support.scheduler import SteppedScheduler

LENGTH, ROWS = 150, [3, 40, 41, 149]


def runner_of(start: Callable[[], SteppedScheduler]) -> Any:
    return start().scheduler.tp_worker.model_runner


def with_plain_model(start: Callable[[], SteppedScheduler]) -> dict[str, Any]:
    """Return the largest differences to a plain model of the same weights, and the probed layers."""
    from support import document_models  # isort: skip (it finds comparators)
    from comparators.weights import load

    assert document_models
    runner = runner_of(start)
    models = model_view.served_model(runner), load(runner.model_config.model_path)
    ids, rows, watched = torch.randint(0, 300, (LENGTH,)), torch.tensor(ROWS), ([], [])
    caches = [dense_cache(model, LENGTH) for model in models]
    hidden = [engine.prefill(m, ids, c) for m, c in zip(models, caches)]
    for model, cache, seen in zip(models, caches, watched):
        note = lambda layer, q, _, seen=seen: seen.append((layer, q))  # noqa: E731
        engine.probe_rows(model, ids[rows], rows, cache, 2, note)
    some = [engine.run_rows(m, ids[rows], rows, c) for m, c in zip(models, caches)]
    pairs = {
        "hidden": [hidden],
        "rows": [some],
        "logits": [[m.logits(h) for m, h in zip(models, some)]],
        "queries": [[a, b] for (_, a), (_, b) in zip(*watched)],
        "kv": [*zip(caches[0].k, caches[1].k), *zip(caches[0].v, caches[1].v)],
    }
    off = {name: max(float((a - b).abs().max()) for a, b in them) for name, them in pairs.items()}
    return {"off": off, "layers": [layer for layer, _ in watched[0]]}


def with_transformers(start: Callable[[], SteppedScheduler]) -> dict[str, Any]:
    import transformers

    runner = runner_of(start)
    model, path = model_view.served_model(runner), runner.model_config.model_path
    other = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids, rows = torch.randint(0, 300, (LENGTH,)), torch.tensor(ROWS)
    cache = dense_cache(model, LENGTH)
    wanted = other(ids[None]).logits[0]
    every = model.logits(engine.prefill(model, ids, cache))
    some = model.logits(engine.run_rows(model, ids[rows], rows, cache))
    off = {"all": float((every - wanted).abs().max())}
    off["some"] = float((some - wanted[rows]).abs().max())
    return {"off": off, "largest": float(wanted.abs().max())}


def pool_sizes(start: Callable[[], SteppedScheduler]) -> dict[str, Any]:
    """Return SGLang's sizes of its pool with and without documents, and the message for too little memory."""
    runner = runner_of(start)
    sizes = runner.kv_cache_configurator
    shape = model_view.served_shape(runner.model, runner.model_config.hf_config)
    needed = working_memory(shape, 4, 512, 100 << 20).total
    free = needed + 1000 * shape.kv_elements_per_token * 4
    results: dict[str, Any] = {"on": sizes.config_from_budget(free).max_total_num_tokens}
    on, sizes.server_args._canopy_documents = sizes.server_args._canopy_documents, None
    results["off"] = sizes.config_from_budget(free).max_total_num_tokens
    sizes.server_args._canopy_documents = on
    try:
        sizes.config_from_budget(64 << 20)
    except SystemExit as end:
        results["end"] = str(end)
    return results
