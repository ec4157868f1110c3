"""Views of SGLang's model and KV pool as the document engine's ``Model`` and ``KVCache``, without
copies.

Steps outside SGLang's own forward (choosing tokens, encoding a document for later) run through the
same layers, see :mod:`.served_model`.

With tensor parallelism each rank keeps its own heads' KV of a document, and all ranks choose alike. A
rank's store, encoder and plans depend only on the requests, which SGLang gives to every rank in the
same order, so the ranks need no messages to stay in step. There are two exceptions: the selector's
scores (a sum over all heads), and the end of encoding in idle time, which only the first rank can
decide.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.model import Model
from canopy_documents.fuse.rope import Rotation, movable_variant, prove_rotation
from canopy_documents.server.served_model import ServedModel
from canopy_documents.store.chunk import Shape
from canopy_documents.store.device_copy import is_host, to_device
from canopy_kernel import attention, pages
from sglang_canopy.errors import CanopyError
from sglang_canopy.ranks import broadcast_from_first, min_over_group
from sglang_canopy.storage.fingerprint import FilesNotFound, find_local_files, full_digest
from sglang_canopy.storage.weights import WEIGHTS

Answer = TypeVar("Answer")

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True, slots=True)
class ServerRope(Rotation):
    """Rotation by SGLang's table, including its rounding (on a CPU it may be bf16)."""

    cos_sin: torch.Tensor

    def table(self, positions: torch.Tensor) -> torch.Tensor:
        """``[n]`` positions -> ``[n, head_dim]`` fp32, cos then sin."""
        return self.cos_sin[to_device(positions, self.cos_sin.device)].float()


def served_model(runner: Any, files: str = "") -> Model:
    """Return the engine's view of a loaded SGLang model; files: :func:`weight_files` at the start.

    Raises CanopyError for an architecture, rotation or weight layout that the engine cannot run.
    """
    causal_lm, config = runner.model, runner.model_config.hf_config
    name = type(causal_lm).__name__
    if name not in ARCHITECTURES:
        raise CanopyError(
            f"document reuse supports {', '.join(ARCHITECTURES)}, not {name}; serve without "
            "--canopy-documents"
        )
    if method := getattr(runner.model_config, "quantization", None):
        raise CanopyError(
            f"the weights are quantised ({method}), which is not tested with document reuse; serve "
            "the model unquantised, or without --canopy-documents"
        )
    movable_variant(config)  # raises for a RoPE scaling that cannot be moved
    attention = causal_lm.model.layers[0].self_attn
    rotary = attention.rotary_emb
    if not rotary.is_neox_style or rotary.rotary_dim != attention.head_dim:
        raise CanopyError(
            "only half-split RoPE over the whole head can be moved; serve without --canopy-documents"
        )
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise CanopyError("sliding-window models cannot reuse documents; serve without it")
    shape = served_shape(causal_lm, config)
    check_head_norms(attention, shape)
    rope = ServerRope(rotary.cos_sin_cache)
    prove_rotation(rope, shape.head_dim, rotary.cos_sin_cache.device)
    return ServedModel(
        causal_lm,
        shape,
        rope,
        answer_of_first_rank(weights_digest(causal_lm, config, f"{files}\0{WEIGHTS.id}")),
        tensor_ranks(config.vocab_size),
        runner.model_config.dtype,
    )


def served_shape(causal_lm: Any, config: Any) -> Shape:
    """Return the sizes of a loaded SGLang model; with tensor parallelism, this rank's heads."""
    attention = causal_lm.model.layers[0].self_attn
    return Shape(
        layers=len(causal_lm.model.layers),
        heads=attention.num_heads,
        kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
    )


def check_head_norms(attention: Any, shape: Shape) -> None:
    """Raise CanopyError if queries and keys are normalised over several heads (untested)."""
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        if norm is not None and tuple(norm.weight.shape) != (shape.head_dim,):
            raise CanopyError(
                "queries and keys are normalised over more than a head, which is not tested with "
                "document reuse; serve without --canopy-documents"
            )


def weight_files(runner: Any) -> str:
    """Return a digest of all bytes of the model's files; empty if they are not on this machine."""
    try:
        return full_digest(find_local_files(runner.model_config.model_path))
    except (FilesNotFound, OSError):
        return ""


def weights_digest(causal_lm: Any, config: Any, weights: str) -> str:
    """Return a digest of the config, of ``weights`` and of samples of the weights.

    weights: the files at the start, and every update since. Samples alone would miss a change of
    some rows.
    """
    digest = hashlib.sha256(config.to_json_string().encode())
    digest.update(weights.encode())
    for weight in causal_lm.parameters():
        flat_weight = weight.detach().reshape(-1)
        step = max(1, flat_weight.numel() // 64)
        sample = flat_weight[::step][:64].float().cpu()
        digest.update(str((tuple(weight.shape), str(weight.dtype))).encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:32]


@dataclass(slots=True)
class RowCache(KVCache):
    """One request's row of SGLang's pools.

    Positions before ``floor`` belong to the exact prefix tree (or to another request's prefix):
    they are read but never written. On a CPU the last layer that was read in full is cached until
    it is written or another layer is read: its rows are scattered in the pool, and selector and
    attention read the same rows.
    """

    floor: int = 0
    _last_read: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def read(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``KVCache.read``. ``len(self)`` positions must be all positions, in order."""
        if positions.numel() != len(self) or not is_host(self.slots):
            return KVCache.read(self, layer, positions)
        if self._last_read is None or self._last_read[0] != layer:
            self._last_read = (layer, *KVCache.read(self, layer, positions))
        return self._last_read[1:]

    def write(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """As ``KVCache.write``, for positions from ``floor`` on.

        On a device all positions must be at or past ``floor``, because a check would wait for the
        device.
        """
        self._last_read = None
        if not is_host(positions):
            KVCache.write(self, layer, positions, k, v)
            return
        writable = positions >= self.floor
        if bool(writable.all()):
            KVCache.write(self, layer, positions, k, v)
        elif bool(writable.any()):
            KVCache.write(self, layer, positions[writable], k[writable], v[writable])

    def attend(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As ``KVCache.attend``; on a CPU the steps are planned once for all layers."""
        if not is_host(q):
            return KVCache.attend(self, layer, q, positions, scale)
        k, v = (x.to(q.dtype) for x in self.read(layer, torch.arange(len(self))))
        return attention.attend(q, k, v, self._plan(positions), scale)


def row_cache(runner: Any, row: torch.Tensor, floor: int) -> RowCache:
    """Return the engine's cache over ``row [n]`` (pool slots by position)."""
    keys, values = pool_views(runner)
    return RowCache(keys, values, row, floor=floor)


def pool_views(runner: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return K and V of every layer as pages of one token, ``[slots, 1, kv_heads, head_dim]``."""
    pool, keys, values = runner.token_to_kv_pool, [], []
    for layer in runner.model.model.layers:
        index = layer.self_attn.attn.layer_id
        keys.append(pages.view_flat(pool.get_key_buffer(index)))
        values.append(pages.view_flat(pool.get_value_buffer(index)))
    return keys, values


def check_layout(runner: Any, shape: Shape) -> None:
    """Raise CanopyError, naming the pool, unless its slots are ``[kv_heads, head_dim]`` in SGLang's
    NHD layout."""
    pool = runner.token_to_kv_pool
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise CanopyError(
            f"the KV pool {type(pool).__name__} has layout {layout!r}; document reuse writes plain NHD "
            "only (unset SGLANG_USE_HND_KVCACHE and SGLANG_AITER_KV_CACHE_LAYOUT, leave out "
            "--enable-unified-memory), or serve without --canopy-documents"
        )
    slot_size = (shape.kv_heads, shape.head_dim)
    for buffers in pool_views(runner):
        size = tuple(buffers[0].shape[2:])
        if size != slot_size:
            raise CanopyError(
                f"the KV pool {type(runner.token_to_kv_pool).__name__} has slots of {size}, not "
                f"{slot_size} (kv heads, head size): another layout than NHD, which document reuse cannot "
                "write; serve without --canopy-documents"
            )


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The model's :class:`~canopy_documents.fuse.model.Ranks`, through SGLang's own collectives.

    vocab: vocabulary size over all ranks.
    """

    vocab: int

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' ``part``, bit-identical on each."""
        from sglang.srt.distributed import tensor_model_parallel_all_reduce

        return tensor_model_parallel_all_reduce(part)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Map ``[m, this rank's share]`` to ``[m, vocab]``."""
        from sglang.srt.distributed import tensor_model_parallel_all_gather

        return tensor_model_parallel_all_gather(logits)[..., : self.vocab]


def tensor_ranks(vocab: int) -> TensorRanks | None:
    """Return the ranks that a model is split over; ``None`` if it is not split."""
    return TensorRanks(vocab) if _group().world_size > 1 else None


def answer_of_first_rank(own_answer: Answer) -> Answer:
    """Return the first rank's answer, on every rank."""
    group = _group()
    is_split = group.world_size > 1
    return broadcast_from_first([group.cpu_group], own_answer) if is_split else own_answer


def on_any_rank(numbers: list[int], count: int) -> list[int]:
    """Return the numbers below ``count`` that any rank has, on every rank."""
    absent = min_over_group(_group().cpu_group, [n not in numbers for n in range(count)])
    return [n for n, is_absent in enumerate(absent) if not is_absent]


def _group() -> Any:
    from sglang.srt.distributed import get_tp_group

    return get_tp_group()
