"""Fields of requests and options about chunks. Every other value is refused with the reason."""

import argparse
import re
from pathlib import Path

import pytest

from canopy_chunks.plugin import entry as plugin
from canopy_chunks.server import options
from canopy_chunks.text import fields
from sglang_canopy.config.refusals import unsupported
from sglang_canopy.config.setups import DOCUMENTS
from sglang_canopy.errors import CanopyError


def test_a_request_without_chunk_fields_has_no_options() -> None:
    assert fields.parse_fields(None) == fields.ChunkFields()
    assert fields.parse_fields({"canopy_turn": 3}) == fields.ChunkFields()


def test_bounds_are_read_as_pairs() -> None:
    parsed_fields = fields.parse_fields(
        {"canopy_chunks": [3, 7, 7, 12], "canopy_recompute_ratio": 0}
    )
    assert parsed_fields.bounds == ((3, 7), (7, 12))
    assert parsed_fields.ratio == 0.0
    assert fields.parse_fields({"canopy_chunks": "off"}).off


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ([0, 10, 5, 20], "overlaps"),
        ([10, 20, 0, 5], "overlaps"),
        ([4, 4], "empty"),
        ([9, 4], "start before end"),
        ([0, 5, 9], "pairs"),
        ([-1, 4], "from 0 on"),
        ([0, 2.5], "whole numbers"),
        ([True, 4], "whole numbers"),
        ([[0, 4]], "whole numbers"),
        ("on", "flat list"),
        ({"a": 1}, "flat list"),
    ],
)
def test_wrong_bounds_are_refused_with_the_reason(given: object, reason: str) -> None:
    with pytest.raises(CanopyError, match=reason) as told:
        fields.parse_fields({"canopy_chunks": given})
    assert len(str(told.value)) < 400


def test_a_chunk_past_the_end_of_the_prompt_is_refused() -> None:
    fields.check_inside(((0, 5), (6, 10)), 10)
    with pytest.raises(CanopyError, match="the prompt has 9 tokens"):
        fields.check_inside(((0, 5), (6, 10)), 9)


@pytest.mark.parametrize(
    "given",
    [
        {"canopy_recompute_ratio": 1.5},
        {"canopy_recompute_ratio": float("nan")},
        {"canopy_recompute_ratio": True},
        {"canopy_selector": "random"},
        {"canopy_selector": 3},
        {"canopy_documents": "all"},
        {"canopy_order": "given"},
        {"canopy_order": ["any"]},
    ],
)
def test_other_wrong_fields_are_refused(given: dict) -> None:
    with pytest.raises(CanopyError, match=next(iter(given))):
        fields.parse_fields(given)


def parsed(*argv: str) -> options.Options | None:
    parser = argparse.ArgumentParser()
    plugin.ADDON.add_flags(None, parser)
    plugin.ADDON.add_flags(None, parser)  # twice is once
    server_args = argparse.Namespace(tp_size=1)
    plugin.parse_options(server_args, parser.parse_args(argv))
    return getattr(server_args, plugin.ATTRIBUTE)


def test_documents_are_off_by_default() -> None:
    assert parsed() is None
    assert parsed("--canopy-documents", "off") is None
    assert parsed("--canopy-documents", "off,ratio=0.3") is None


@pytest.mark.parametrize(
    "given",
    ["on,ratio=0.3,memory_mb=64", "ratio=0.3,memory-mb=64", '{"ratio": 0.3, "memory_mb": 64}'],
)
def test_keys_are_given_as_words_or_as_json(given: str) -> None:
    assert parsed("--canopy-documents", given) == options.Options(ratio=0.3, memory_mb=64)
    assert parsed("--canopy-documents", "on") == options.Options()


def test_the_flags_earlier_name_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert parsed("--canopy-chunks", "ratio=0.3") == options.Options(ratio=0.3)
    assert "--canopy-chunks is called --canopy-documents now" in caplog.text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("ratio=1.2", "key 'ratio' must be from 0 to 1"),
        ("rato=0.2", "unknown key 'rato'; allowed keys: .*ratio"),
        ("maybe", "key 'reuse' must be one of on, off"),
        ('{"separator": "  "}', "blank"),
        ("memory_mb=0", "documents need memory"),
        ("disk_mb=5", "needs 'directory'"),
        ("learn_share=-1", "key 'learn_share'"),
        ("selector=random", "key 'selector' must be one of question, frequency"),
        ("encode=alone", "key 'encode' must be one of prefix, mixed"),
    ],
)
def test_wrong_keys_stop_the_start(given: str, reason: str) -> None:
    with pytest.raises(SystemExit, match=f"--canopy-documents: .*{reason}"):
        parsed("--canopy-documents", given)


def test_the_pages_flags_are_accepted() -> None:
    docs = Path(__file__).parents[3] / "docs"
    text = "".join((docs / part / "documents.md").read_text() for part in ("guide", "reference"))
    shown = re.findall(r"--canopy-documents ('[^']*'|[^\s`']+)", text)
    assert len(shown) >= 3
    for value in shown:
        assert parsed("--canopy-documents", value.strip("'")), value


def test_unsupported_servers_are_named() -> None:
    good = argparse.Namespace(tp_size=1, kv_cache_dtype="auto", disaggregation_mode="null")
    assert unsupported(DOCUMENTS, good, environment={}) is None
    for name, value in (
        ("pp_size", 2),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("speculative_algorithm", "EAGLE"),
        ("disaggregation_mode", "prefill"),
        ("quantization", "fp8"),
        ("cuda_graph_backend_prefill", "full"),
        ("cuda_graph_config", {"prefill": {"backend": "full"}}),
    ):
        bad = argparse.Namespace(**{**vars(good), name: value})
        refusal = unsupported(DOCUMENTS, bad, environment={})
        assert refusal is not None, name
        assert "leave out --canopy-documents" in refusal


def test_whole_graphs_of_prefill_are_refused_in_both_spellings_and_others_are_not() -> None:
    """A replayed graph runs no Python: documents' KV would be passed over without a word."""
    config = pytest.importorskip("sglang.srt.model_executor.cuda_graph_config")
    resolved = config.default_cuda_graph_config()
    for prefill, decode, stops in (
        ("full", "disabled", True), ("breakable", "full", False), ("disabled", "full", False),
    ):  # fmt: skip
        resolved.prefill.backend, resolved.decode.backend = prefill, decode
        spelt = {"prefill": {"backend": prefill}, "decode": {"backend": decode}}
        for given in (
            {"cuda_graph_config": resolved},
            {"cuda_graph_config": spelt},
            {"cuda_graph_backend_prefill": prefill, "cuda_graph_backend_decode": decode},
        ):
            refusal = unsupported(DOCUMENTS, argparse.Namespace(**given), environment={})
            assert (refusal is not None) == stops, given
            assert not stops or "--cuda-graph-backend-prefill breakable" in refusal
