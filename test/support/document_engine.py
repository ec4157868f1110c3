"""An engine of document reuse over a small model, its requests, and their effects."""

from types import SimpleNamespace
from typing import Any

import torch

from canopy_documents.server import scheduler
from canopy_documents.server.engine import DocumentEngine
from sglang_canopy.wire.request_state import state_of

SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS = 10, 40, 8
DOCUMENT_END = SYSTEM_TOKENS + DOCUMENT_TOKENS
"""End of the first document in a prompt."""
NO_FILES = SimpleNamespace(model_path="no/such-model")
NO_STORAGE = SimpleNamespace(hicache_storage_backend=None)


def pool_runner(shape, keys, values, **fields):
    """A model runner's pool with these buffers per layer, and layers with their ids."""
    pool = SimpleNamespace(get_key_buffer=lambda i: keys[i], get_value_buffer=lambda i: values[i])
    attentions = (SimpleNamespace(layer_id=i) for i in range(shape.layers))
    layers = [SimpleNamespace(self_attn=SimpleNamespace(attn=layer)) for layer in attentions]
    model = SimpleNamespace(model=SimpleNamespace(layers=layers))
    return SimpleNamespace(token_to_kv_pool=pool, model=model, **fields)


def bare_runner(**fields):
    """The attributes of a model runner without a pool that an engine reads."""
    backend = SimpleNamespace(canopy=SimpleNamespace(fused_attention=None))
    defaults = {"model_config": NO_FILES, "server_args": NO_STORAGE, "canopy": None}
    return SimpleNamespace(attn_backend=backend, **(defaults | fields))


class Tokenizer:
    """One token a letter, at most 30, within the small model's vocabulary."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % 300 for letter in text][:30]

    eos_token_id = None


def request(ids, bounds, salt: str | None = None, **fields):
    fields = {
        "return_logprob": False, "logprob_start_len": -1, "output_ids": [], "lora_id": None,
        "input_embeds": None, "positional_embed_overrides": None, "multimodal_inputs": None,
        "session": None, "return_hidden_states": False, "return_routed_experts": False,
        "beam_group": None, "canopy_documents": None, "extra_key": None, **fields,
    }  # fmt: skip
    params = SimpleNamespace(custom_params={"canopy_document_bounds": bounds})
    fields |= {"cache_salt": salt, "sampling_params": params}
    return SimpleNamespace(origin_input_ids=list(ids), **fields)


def prompt(ids, order=(0, 1, 2)):
    """A request's ids and bounds: a system text, documents by number, a question."""
    prompt_ids, bounds = ids[:SYSTEM_TOKENS].tolist(), []
    for document in order:
        start = SYSTEM_TOKENS + document * DOCUMENT_TOKENS
        bounds += [len(prompt_ids), len(prompt_ids) + DOCUMENT_TOKENS]
        prompt_ids += ids[start : start + DOCUMENT_TOKENS].tolist()
    return prompt_ids + ids[-QUESTION_TOKENS:].tolist(), bounds


def register_head(engine: DocumentEngine, state) -> None:
    """Register the tokens before the first document as seen."""
    engine.library.heads.record_head(state.salt, state.variants[0].head)


def learn(engine: DocumentEngine, req, head_is_known: bool = True) -> None:
    """Encode the missing chunks of ``req``, as after a fused prefill."""
    state = engine.new_request(req)
    if head_is_known:
        register_head(engine, state)
    state.is_fused = True  # so that nothing is taken from a pool
    engine.encode_missing(req, state, torch.arange(len(req.origin_input_ids)))
    while engine.library.encoder.busy:
        engine.library.encoder.step()


def chunk_tiers(engine: DocumentEngine, req) -> list[str | None]:
    return [chunk.tier for chunk in engine.library.resolve(engine.new_request(req))]


def request_after(system: int, document, salt: str | None = None):
    """A request of one document behind a system text of its own."""
    return request([system] * SYSTEM_TOKENS + document + [1], [SYSTEM_TOKENS, DOCUMENT_END], salt)


def queue_req(engine: DocumentEngine, req: Any) -> Any:
    """Queue ``req``, which binds it to the namespace of its KV. Return its chunk state."""
    state = state_of(req).documents = engine.new_request(req)
    scheduler.set_extra_key(scheduler_of(engine), req)
    return state


def scheduler_of(engine: DocumentEngine) -> Any:
    """A scheduler with nothing but its engine."""
    runner = SimpleNamespace(canopy=engine)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), enable_lora=False)
