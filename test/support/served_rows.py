"""Scenarios of `worker`: the rows that SGLang's layers compute for document reuse, and the pool that it leaves."""

from collections.abc import Callable
from typing import Any

import torch

from canopy_documents.fuse import rows as engine
from canopy_documents.fuse.cache import dense_cache
from canopy_documents.server import model_view
from canopy_documents.server.start import reserved_memory
from support.scheduler import SteppedScheduler

PROMPT_TOKENS, ROW_POSITIONS = 150, [3, 40, 41, 149]


def start_runner(start: Callable[[], SteppedScheduler]) -> Any:
    return start().scheduler.tp_worker.model_runner


def with_plain_model(start: Callable[[], SteppedScheduler]) -> dict[str, Any]:
    """Return the largest differences from a plain model of the same weights, and the probed layers."""
    from support import document_models  # isort: skip (it finds comparators)
    from comparators.weights import load

    assert document_models
    runner = start_runner(start)
    models = model_view.served_model(runner), load(runner.model_config.model_path)
    ids, rows = torch.randint(0, 300, (PROMPT_TOKENS,)), torch.tensor(ROW_POSITIONS)
    queries_by_model: tuple[list[Any], list[Any]] = ([], [])
    caches = [dense_cache(model, PROMPT_TOKENS) for model in models]
    hidden_states = [engine.prefill(model, ids, cache) for model, cache in zip(models, caches)]
    for model, cache, queries in zip(models, caches, queries_by_model):
        record = lambda layer, q, _, queries=queries: queries.append((layer, q))  # noqa: E731
        engine.probe_rows(model, ids[rows], rows, cache, 2, record)
    row_states = [engine.run_rows(m, ids[rows], rows, cache) for m, cache in zip(models, caches)]
    compared = {
        "hidden": [hidden_states],
        "rows": [row_states],
        "logits": [[model.logits(states) for model, states in zip(models, row_states)]],
        "queries": [[ours, plain] for (_, ours), (_, plain) in zip(*queries_by_model)],
        "kv": [*zip(caches[0].k, caches[1].k), *zip(caches[0].v, caches[1].v)],
    }
    differences = {
        name: max(float((ours - plain).abs().max()) for ours, plain in tensor_pairs)
        for name, tensor_pairs in compared.items()
    }
    return {"differences": differences, "layers": [layer for layer, _ in queries_by_model[0]]}


def with_transformers(start: Callable[[], SteppedScheduler]) -> dict[str, Any]:
    import transformers

    runner = start_runner(start)
    model, path = model_view.served_model(runner), runner.model_config.model_path
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids, rows = torch.randint(0, 300, (PROMPT_TOKENS,)), torch.tensor(ROW_POSITIONS)
    cache = dense_cache(model, PROMPT_TOKENS)
    expected = reference(ids[None]).logits[0]
    all_logits = model.logits(engine.prefill(model, ids, cache))
    row_logits = model.logits(engine.run_rows(model, ids[rows], rows, cache))
    differences = {"all": float((all_logits - expected).abs().max())}
    differences["some"] = float((row_logits - expected[rows]).abs().max())
    return {"differences": differences, "largest": float(expected.abs().max())}


def pool_sizes(start: Callable[[], SteppedScheduler]) -> dict[str, Any]:
    """Return the pool's tokens with document reuse ``on`` and ``off``, and the message for too little memory."""
    runner = start_runner(start)
    configurator = runner.kv_cache_configurator
    shape = model_view.served_shape(runner.model, runner.model_config.hf_config)
    needed_bytes = reserved_memory(shape, 4, 512, 100 << 20).total_bytes
    free_bytes = needed_bytes + 1000 * shape.kv_elements_per_token * 4
    slots_with_documents = configurator.config_from_budget(free_bytes).max_total_num_tokens
    results: dict[str, Any] = {"on": slots_with_documents}
    server_args = configurator.server_args
    reuse_options, server_args._canopy_documents = server_args._canopy_documents, None
    results["off"] = configurator.config_from_budget(free_bytes).max_total_num_tokens
    server_args._canopy_documents = reuse_options
    try:
        configurator.config_from_budget(64 << 20)
    except SystemExit as exit_error:
        results["end"] = str(exit_error)
    return results
