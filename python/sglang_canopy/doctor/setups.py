"""Table of server set-ups and their support, for the documentation and the doctor.

A cell has the level of testing of a set-up with one part of Canopy, and the test. ``refusals.py`` defines
the refused set-ups; ``test/doctor/test_setups.py`` compares this table with it and with the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sglang_canopy.config.refusals import CHUNKS, DISK, POLICIES, unsupported, whole_prefill_graph

SERVED, CACHE, REFUSED, UNTESTED = "served here", "cache level", "refused", "untested"
"""States: tested on a CPU with a real server; tested with the real cache, pools or scheduler objects
without a server; refused at start with the reason; neither refused nor tested."""

FEATURES = {
    "device": (POLICIES,),
    "host": (POLICIES,),
    "disk": (POLICIES, DISK),
    "chunks": (CHUNKS,),
}
"""Part -> features that may be refused."""
PARTS = tuple(FEATURES)
"""Policies on the device, in host memory and on the disk, and reuse of documents' KV."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Level of testing of one part of Canopy in a set-up."""

    state: str
    test: str | None = None
    """Test, as ``folder/file.py::name`` below ``test/``."""
    why: str = ""
    """Reason for ``REFUSED`` or ``UNTESTED``."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One row. ``option`` (of ``ServerArgs`` or the model) selects the set-up; ``value`` is a sample."""

    name: str
    option: str
    value: Any
    device: Cell | None = None
    host: Cell | None = None
    disk: Cell | None = None
    chunks: Cell | None = None
    """``None`` means refused, or untested if it is not refused."""
    applies: Callable[[Any], bool] = bool
    """Whether the option's value selects this set-up."""

    def cell(self, part: str) -> Cell:
        """Return the state of ``part``."""
        sample = SimpleNamespace(**{self.option: self.value})
        why = refused(part, sample)
        cell: Cell | None = getattr(self, part)
        if why is not None:
            return Cell(REFUSED, why=why.partition(";")[0])
        return cell or Cell(UNTESTED, why="not tried yet")


def refused(part: str, configured: Any) -> str | None:
    """Return the reason why ``part`` (of ``PARTS``) is refused with ``configured``, or ``None``."""
    reasons = (unsupported(feature, configured, environment={}) for feature in FEATURES[part])
    return next((why for why in reasons if why is not None), None)


def _served(test: str) -> Cell:
    return Cell(SERVED, f"e2e/{test}")


def _cache(test: str) -> Cell:
    return Cell(CACHE, test)


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _other(*usual: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in usual


def _above(limit: int) -> Callable[[Any], bool]:
    return lambda value: (value or 0) > limit


_EVICTS = _served("test_canopy_server.py::test_a_prefix_is_found_again_and_the_pool_evicts")
_TIERS = _served(
    "test_three_tiers.py::test_three_tiers_answer_alike_and_a_restart_is_served_from_disk"
)
_TWO = _served("test_two_ranks.py::test_both_ranks_evict_alike_over_500_requests")
_MLA = _served("test_mla_served.py::test_mla_answers_alike_from_three_tiers")

_USUAL = _served(
    "test_setups_served.py::test_chunks_mixed_batches_pages_of_64_priorities_and_schemas"
)
_LORA = _served("test_lora_served.py::test_adapters_answer_alike_and_never_share_kv")
_RECEIVED = _cache(
    "server/scheduler/test_requests_received.py::test_a_grpc_client_cannot_write_a_stamp"
)
_SLOTS = _cache("radix/test_sglang_kit.py::test_no_slot_of_two_tiers_is_lost_or_used_twice")

_NGRAM = _served("test_ngram_served.py::test_drafts_by_ngrams_answer_alike_on_three_tiers")
_HYBRID = _served("test_hybrid_served.py::test_hybrid_models_answer_as_with_sglangs_policy")

SETUPS = (
    Setup(
        "one process, CPU",
        "device",
        "cpu",
        _EVICTS,
        _TIERS,
        _TIERS,
        _served("test_chunks.py::test_a_second_prompt_reuses_documents_in_another_order"),
        _is("cpu"),
    ),
    Setup("CUDA", "device", "cuda", applies=_is("cuda")),
    Setup(
        "`--tp-size 2`",
        "tp_size",
        2,
        _TWO,
        _TWO,
        _served("test_two_ranks.py::test_what_is_known_comes_back_with_every_read_from_disk"),
        _served("test_chunks.py::test_tensor_parallel_ranks_reuse_alike"),
        _is(2),
    ),
    Setup("`--tp-size` above 2", "tp_size", 4, applies=_above(2)),
    Setup(
        "`--dp-size`",
        "dp_size",
        2,
        _served(
            "test_hints_and_keys.py::test_a_hint_reaches_every_replica_and_only_trusted_ones_count"
        ),
        disk=_cache(
            "storage/test_storage_ranks.py::test_replicas_of_data_parallelism_each_have_a_disk_tier"
        ),
        applies=_above(1),
    ),
    Setup(
        "`--enable-dp-attention`",
        "enable_dp_attention",
        True,
        _cache(
            "server/scheduler/test_receiving_ranks.py::"
            "test_replicas_of_data_parallel_attention_are_apart_and_all_hear_of_hints"
        ),
    ),
    Setup(
        "`--pp-size`",
        "pp_size",
        2,
        _served("test_parallel_served.py::test_answers_are_those_of_sglangs_policy"),
        disk=_cache(
            "storage/test_namespace.py::test_page_size_heads_and_ranks_are_part_of_the_namespace"
        ),
        applies=_above(1),
    ),
    Setup("MLA models (DeepSeek, Kimi)", "is_mla", True, _MLA, _MLA, _MLA),
    Setup("sliding-window models", "is_hybrid_swa", True, _HYBRID, _HYBRID),
    Setup("Mamba and linear attention", "is_hybrid_ssm", True, _HYBRID, _HYBRID),
    Setup("`--enable-unified-memory`", "enable_unified_memory", True),
    Setup(
        "images in prompts",
        "is_multimodal",
        True,
        _served("test_images_served.py::test_pictures_are_told_apart_and_the_text_is_the_same"),
        _cache("radix/test_images.py::test_the_kv_of_another_image_is_never_found"),
    ),
    Setup(
        "LoRA adapters",
        "enable_lora",
        True,
        _LORA,
        _LORA,
        _LORA,
    ),
    Setup(
        "pages of 1 token",
        "page_size",
        1,
        _EVICTS,
        _SLOTS,
        None,
        _served("test_chunks.py::test_a_second_prompt_reuses_documents_in_another_order"),
        _is(1),
    ),
    Setup(
        "pages of 16 tokens",
        "page_size",
        16,
        _TWO,
        _TWO,
        _served(
            "test_three_tiers.py::test_host_memory_as_a_buffer_only_gives_pages_of_the_disk_back"
        ),
        _served("test_chunk_windows.py::test_windows_pages_and_retraction"),
        _is(16),
    ),
    Setup(
        "pages of 64 tokens",
        "page_size",
        64,
        _USUAL,
        applies=_is(64),
    ),
    Setup(
        "the overlap schedule",
        "overlap_schedule",
        True,
        _USUAL,
        chunks=_served(
            "test_chunk_windows.py::test_decode_rows_in_a_fused_batch_and_the_overlap_schedule"
        ),
    ),
    Setup(
        "chunked prefill",
        "chunked_prefill_size",
        256,
        _served("test_queue_order.py::test_every_answer_is_what_it_is_alone"),
        chunks=_served("test_chunk_windows.py::test_windows_pages_and_retraction"),
        applies=_above(0),
    ),
    Setup(
        "`--enable-mixed-chunk`",
        "enable_mixed_chunk",
        True,
        _USUAL,
        chunks=_served(
            "test_chunk_windows.py::test_decode_rows_in_a_fused_batch_and_the_overlap_schedule"
        ),
    ),
    Setup(
        "`--enable-priority-scheduling`",
        "enable_priority_scheduling",
        True,
        _served("test_queue_order.py::test_short_ones_overtake_and_priorities_go_first"),
    ),
    Setup("structured output", "structured_output", True, _USUAL),
    Setup(
        "`sglang.Engine` in Python",
        "engine",
        True,
        _served("test_setups_served.py::test_an_engine_in_python_stamps_learns_and_says_the_same"),
    ),
    Setup(
        "speculative decoding by n-grams",
        "speculative_algorithm",
        "NGRAM",
        _NGRAM,
        _NGRAM,
        _NGRAM,
        applies=_is("NGRAM"),
    ),
    Setup(
        "speculative decoding with a draft model (EAGLE, MTP)",
        "speculative_algorithm",
        "EAGLE",
        _cache("radix/test_token_pairs.py::test_random_work_on_two_tiers_keeps_every_slot"),
        _cache("radix/test_token_pairs.py::test_a_drafts_kv_follows_the_targets_through_the_host"),
        applies=lambda algorithm: algorithm not in (None, "NGRAM"),
    ),
    Setup(
        "`--disaggregation-mode prefill`",
        "disaggregation_mode",
        "prefill",
        _cache("radix/test_prefill_side.py::test_the_next_turn_tells_what_the_output_was"),
        _cache("radix/test_prefill_side.py::test_a_turn_that_comes_back_from_the_host_is_a_return"),
        applies=_is("prefill"),
    ),
    Setup("`--disaggregation-mode decode`", "disaggregation_mode", "decode", applies=_is("decode")),
    Setup(
        "`--grpc-port`",
        "grpc_port",
        30001,
        _cache("server/http/test_grpc_bridge.py::test_a_request_over_grpc_is_stamped"),
    ),
    Setup("`--grpc-mode`", "grpc_mode", True, _RECEIVED),
    Setup("`--smg-grpc-mode`", "smg_grpc_mode", True, _RECEIVED),
    Setup(
        "`--tokenizer-worker-num` above 1",
        "tokenizer_worker_num",
        2,
        _served("test_tokenizer_workers.py::test_two_workers_stamp_alike_and_each_takes_hints"),
        applies=_above(1),
    ),
    Setup("`--ep-size` above 1", "ep_size", 8, applies=_above(1)),
    Setup("`--moe-a2a-backend`", "moe_a2a_backend", "deepep", applies=_other("none")),
    Setup("`--moe-runner-backend`", "moe_runner_backend", "deep_gemm", applies=_other("auto")),
    Setup("several nodes (`--nnodes`)", "nnodes", 2, applies=_above(1)),
    Setup(
        "HiCache storage `mooncake`",
        "hicache_storage_backend",
        "mooncake",
        host=_cache(
            "storage/test_mooncake_tree.py::test_a_tree_reads_what_another_one_wrote_at_the_same_time"
        ),
        applies=_is("mooncake"),
    ),
    Setup(
        "HiCache storage other than `canopy` and `mooncake` (file, nixl, hf3fs, ...)",
        "hicache_storage_backend",
        "nixl",
        applies=_other("canopy", "mooncake", "dynamic"),
    ),
    Setup("`--use-ray`", "use_ray", True),
    Setup("`--enable-streaming-session`", "enable_streaming_session", True),
    Setup("`--enable-session-radix-cache`", "enable_session_radix_cache", True),
    Setup("`--enable-lmcache`", "enable_lmcache", True),
    Setup("`--enable-flexkv`", "enable_flexkv", True),
    Setup("an external cache linker", "enable_unified_cache_external_linker", True),
    Setup("`--disable-radix-cache`", "disable_radix_cache", True),
    Setup("`--radix-cache-backend`", "radix_cache_backend", "other"),
    Setup(
        "`--kv-cache-dtype`",
        "kv_cache_dtype",
        "fp8_e5m2",
        applies=lambda v: v not in (None, "auto"),
    ),
    Setup("quantised weights", "quantization", "awq"),
    Setup(
        "`--cuda-graph-backend-prefill full`",
        "cuda_graph_backend_prefill",
        "full",
        applies=lambda v: v == "full",
    ),
    Setup(
        "`--cuda-graph-config` with prefill full",
        "cuda_graph_config",
        {"prefill": {"backend": "full"}},
        applies=whole_prefill_graph,
    ),
    Setup("`--enable-return-hidden-states`", "enable_return_hidden_states", True),
    Setup("`--enable-encoder-swa-bounded-replay`", "enable_encoder_swa_bounded_replay", True),
)


def tested(configured: Any, parts: tuple[str, ...]) -> list[tuple[Setup, dict[str, list[str]]]]:
    """Return the set-ups of a server's arguments ``configured``, each with its tested ``parts`` by
    level."""
    found = []
    for setup in SETUPS:
        if setup.applies(getattr(configured, setup.option, None)):
            levels: dict[str, list[str]] = {}
            for part in parts:
                state = setup.cell(part).state
                if state in (SERVED, CACHE):
                    levels.setdefault(state, []).append(part)
            if levels:
                found.append((setup, levels))
    return found


def untested(configured: Any, parts: tuple[str, ...]) -> list[tuple[Setup, list[str]]]:
    """Return the set-ups of a server's arguments ``configured``, each with its untested ``parts``."""
    found = []
    for setup in SETUPS:
        if setup.applies(getattr(configured, setup.option, None)):
            untried = [part for part in parts if setup.cell(part).state == UNTESTED]
            if untried:
                found.append((setup, untried))
    return found
