"""The table of set-ups against the refusals and the tests that it names."""

import ast
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from canopy_chunks.plugin import refusals as documents
from sglang_canopy.config.refusals import ADDITIONS, REFUSALS
from sglang_canopy.doctor.setups import (
    CACHE,
    REFUSED,
    SERVED,
    SETUPS,
    UNTESTED,
    parts,
    refused,
    untested,
)

TESTS = Path(__file__).resolve().parents[1]
CELLS = [(setup, part) for setup in SETUPS for part in parts()]
EACH = pytest.mark.parametrize(("setup", "part"), CELLS, ids=lambda one: getattr(one, "name", one))

TESTED = {
    "storage/test_mooncake_tree.py::test_a_tree_reads_pages_that_another_is_writing": [
        ("HiCache storage `mooncake`", "host")
    ],
    "e2e/test_canopy_server.py::test_a_prefix_is_found_again_and_the_pool_evicts": [
        ("one process, CPU", "device"),
        ("pages of 1 token", "device"),
    ],
    "e2e/test_three_tiers.py::test_three_tiers_leave_answers_unchanged_and_a_restart_is_served_from_disk": [
        ("one process, CPU", "host"),
        ("one process, CPU", "disk"),
    ],
    "e2e/test_chunks.py::test_a_second_prompt_reuses_documents_in_another_order": [
        ("one process, CPU", "chunks"),
        ("pages of 1 token", "chunks"),
    ],
    "e2e/test_two_ranks.py::test_both_ranks_evict_the_same_leaves_over_500_requests": [
        ("`--tp-size 2`", "device"),
        ("`--tp-size 2`", "host"),
        ("pages of 16 tokens", "device"),
        ("pages of 16 tokens", "host"),
    ],
    "e2e/test_two_ranks.py::test_metadata_is_restored_with_every_read_from_disk": [
        ("`--tp-size 2`", "disk")
    ],
    "e2e/test_chunks.py::test_tensor_parallel_ranks_reuse_the_same_documents": [
        ("`--tp-size 2`", "chunks")
    ],
    "e2e/test_hints_and_keys.py::test_a_hint_reaches_every_replica_and_only_trusted_ones_count": [
        ("`--dp-size`", "device")
    ],
    "storage/test_storage_ranks.py::test_replicas_of_data_parallelism_each_have_a_disk_tier": [
        ("`--dp-size`", "disk")
    ],
    "server/scheduler/test_receiving_ranks.py::test_dp_attention_replicas_are_separate_and_all_receive_hints": [
        ("`--enable-dp-attention`", "device")
    ],
    "e2e/test_parallel_served.py::test_answers_are_those_of_sglangs_policy": [
        ("`--pp-size`", "device")
    ],
    "storage/test_namespace.py::test_page_size_heads_and_ranks_are_part_of_the_namespace": [
        ("`--pp-size`", "disk")
    ],
    "e2e/test_mla_served.py::test_mla_answers_are_unchanged_from_three_tiers": [
        ("MLA models (DeepSeek, Kimi)", "device"),
        ("MLA models (DeepSeek, Kimi)", "host"),
        ("MLA models (DeepSeek, Kimi)", "disk"),
    ],
    "e2e/test_hybrid_served.py::test_hybrid_models_answer_as_with_sglangs_policy": [
        ("sliding-window models", "device"),
        ("sliding-window models", "host"),
        ("Mamba and linear attention", "device"),
        ("Mamba and linear attention", "host"),
    ],
    "e2e/test_images_served.py::test_pictures_are_distinguished_with_equal_text": [
        ("images in prompts", "device")
    ],
    "radix/test_images.py::test_the_kv_of_another_image_is_never_found": [
        ("images in prompts", "host")
    ],
    "e2e/test_lora_served.py::test_adapters_answer_as_under_lru_and_never_share_kv": [
        ("LoRA adapters", "device"),
        ("LoRA adapters", "host"),
        ("LoRA adapters", "disk"),
    ],
    "radix/test_sglang_kit.py::test_no_slot_of_two_tiers_is_lost_or_used_twice": [
        ("pages of 1 token", "host")
    ],
    "e2e/test_three_tiers.py::test_buffer_only_host_memory_returns_pages_of_the_disk": [
        ("pages of 16 tokens", "disk")
    ],
    "e2e/test_chunk_windows.py::test_windows_pages_and_retraction": [
        ("pages of 16 tokens", "chunks"),
        ("chunked prefill", "chunks"),
    ],
    "e2e/test_setups_served.py::test_chunks_mixed_batches_pages_of_64_priorities_and_schemas": [
        ("pages of 64 tokens", "device"),
        ("the overlap schedule", "device"),
        ("`--enable-mixed-chunk`", "device"),
        ("structured output", "device"),
    ],
    "e2e/test_chunk_windows.py::test_decode_rows_in_a_fused_batch_and_the_overlap_schedule": [
        ("the overlap schedule", "chunks"),
        ("`--enable-mixed-chunk`", "chunks"),
    ],
    "e2e/test_queue_order.py::test_every_answer_equals_the_answer_alone": [
        ("chunked prefill", "device")
    ],
    "e2e/test_queue_order.py::test_short_requests_overtake_and_priorities_come_first": [
        ("`--enable-priority-scheduling`", "device")
    ],
    "e2e/test_setups_served.py::test_an_engine_in_python_stamps_learns_and_answers_as_under_lru": [
        ("`sglang.Engine` in Python", "device")
    ],
    "e2e/test_ngram_served.py::test_ngram_drafts_leave_answers_unchanged_on_three_tiers": [
        ("speculative decoding by n-grams", "device"),
        ("speculative decoding by n-grams", "host"),
        ("speculative decoding by n-grams", "disk"),
    ],
    "radix/test_token_pairs.py::test_random_work_on_two_tiers_keeps_every_slot": [
        ("speculative decoding with a draft model (EAGLE, MTP)", "device")
    ],
    "radix/test_token_pairs.py::test_a_drafts_kv_follows_the_targets_through_the_host": [
        ("speculative decoding with a draft model (EAGLE, MTP)", "host")
    ],
    "radix/test_prefill_side.py::test_the_next_turn_contains_the_output": [
        ("`--disaggregation-mode prefill`", "device")
    ],
    "radix/test_prefill_side.py::test_a_turn_loaded_from_the_host_is_a_return": [
        ("`--disaggregation-mode prefill`", "host")
    ],
    "server/http/test_grpc_bridge.py::test_a_request_over_grpc_is_stamped": [
        ("`--grpc-port`", "device")
    ],
    "server/scheduler/test_requests_received.py::test_a_grpc_client_cannot_write_a_stamp": [
        ("`--grpc-mode`", "device"),
        ("`--smg-grpc-mode`", "device"),
    ],
    "e2e/test_tokenizer_workers.py::test_two_workers_make_equal_stamps_and_accept_hints": [
        ("`--tokenizer-worker-num` above 1", "device")
    ],
}
"""Test of a cell, as ``folder/file.py::name`` below ``test/`` -> the set-up's name and the part."""


@cache
def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@EACH
def test_a_cell_has_a_test_that_exists_or_a_reason_why_there_is_none(setup, part) -> None:
    cell = setup.cell(part)
    tests = [test for test, cells in TESTED.items() if (setup.name, part) in cells]
    if cell.state in (REFUSED, UNTESTED):
        assert not tests
        assert cell.why
        return
    (test,) = tests
    file, name = test.split("::")
    assert name in functions_of(TESTS / file), test
    assert cell.state == (SERVED if file.startswith("e2e/") else CACHE)


@EACH
def test_set_ups_refused_in_the_table_are_refused_at_the_start(setup, part) -> None:
    given = SimpleNamespace(**{setup.option: setup.value})
    why = refused(part, given)
    assert (setup.cell(part).state == REFUSED) == (why is not None)
    if why is not None:
        added = ADDITIONS.get(part)
        state = (setup.name in added.served or None) if added else getattr(setup, part)
        assert state is None, "refused, and yet a test is named"


def test_every_refusal_of_policies_and_documents_is_in_the_table() -> None:
    options = {one.option for one in REFUSALS if one.option and (one.policies or one.disk)}
    options |= {one.option for one in documents.REFUSALS}
    assert options <= {setup.option for setup in SETUPS}


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_a_sample_is_its_own_set_up(setup) -> None:
    assert setup.applies(setup.value)


def test_names_are_unique() -> None:
    names = [setup.name for setup in SETUPS]
    assert len(set(names)) == len(names)


def test_untested_features_of_a_server_are_found() -> None:
    server = SimpleNamespace(device="cuda", tp_size=2, page_size=16)
    (found, parts), *more = untested(server, ("device", "host"))
    assert (found.name, parts, more) == ("CUDA", ["device", "host"], [])
