"""Fields of requests and options about documents. Every other value is refused with the reason."""

import argparse
import re
from pathlib import Path

import pytest

from canopy_documents.plugin import entry as plugin
from canopy_documents.server import options
from canopy_documents.text import fields
from sglang_canopy.config.refusals import unsupported_reason
from sglang_canopy.config.setups import DOCUMENTS
from sglang_canopy.errors import CanopyError


def test_a_request_without_document_fields_has_no_options() -> None:
    assert fields.parse_fields(None) == fields.DocumentFields()
    assert fields.parse_fields({"canopy_turn": 3}) == fields.DocumentFields()


def test_bounds_are_read_as_pairs() -> None:
    params = {"canopy_document_bounds": [3, 7, 7, 12], "canopy_recompute_ratio": 0}
    parsed_fields = fields.parse_fields(params)
    assert parsed_fields.bounds == ((3, 7), (7, 12))
    assert parsed_fields.ratio == 0.0
    assert fields.parse_fields({"canopy_document_bounds": "off"}).off


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("document_bounds", [0, 10, 5, 20], "overlaps"),
        ("document_bounds", [10, 20, 0, 5], "overlaps"),
        ("document_bounds", [4, 4], "empty"),
        ("document_bounds", [9, 4], "start before end"),
        ("document_bounds", [0, 5, 9], "pairs"),
        ("document_bounds", [-1, 4], "from 0 on"),
        ("document_bounds", [0, 2.5], "whole numbers"),
        ("document_bounds", [True, 4], "whole numbers"),
        ("document_bounds", [[0, 4]], "whole numbers"),
        ("document_bounds", "on", "flat list"),
        ("document_bounds", {"a": 1}, "flat list"),
        ("recompute_ratio", 1.5, ""),
        ("recompute_ratio", float("nan"), ""),
        ("recompute_ratio", True, ""),
        ("documents", "all", ""),
        ("order", "given", ""),
        ("order", ["any"], ""),
    ],
)
def test_a_wrong_field_is_refused_with_the_reason(field: str, value: object, reason: str) -> None:
    with pytest.raises(CanopyError, match=f"canopy_{field}.*{reason}") as refusal:
        fields.parse_fields({f"canopy_{field}": value})
    assert len(str(refusal.value)) < 400


def test_a_document_past_the_end_of_the_prompt_is_refused() -> None:
    fields.check_inside(((0, 5), (6, 10)), 10)
    with pytest.raises(CanopyError, match="the prompt has 9 tokens"):
        fields.check_inside(((0, 5), (6, 10)), 9)


def parse_flags(*argv: str) -> options.ReuseOptions | None:
    parser = argparse.ArgumentParser()
    plugin.ADDON.add_flags(None, parser)
    plugin.ADDON.add_flags(None, parser)  # a second plugin may add them again
    server_args = argparse.Namespace(tp_size=1)
    plugin.parse_options(server_args, parser.parse_args(argv))
    return getattr(server_args, plugin.ATTRIBUTE)


def test_documents_are_off_by_default() -> None:
    assert parse_flags() is None
    assert parse_flags("--canopy-documents", "off") is None
    assert parse_flags("--canopy-documents", "off,ratio=0.3") is None


@pytest.mark.parametrize(
    "keys",
    ["on,ratio=0.3,memory_mb=64", "ratio=0.3,memory-mb=64", '{"ratio": 0.3, "memory_mb": 64}'],
)
def test_keys_are_read_from_words_or_json(keys: str) -> None:
    assert parse_flags("--canopy-documents", keys) == options.ReuseOptions(ratio=0.3, memory_mb=64)
    assert parse_flags("--canopy-documents", "on") == options.ReuseOptions()


def test_the_flags_earlier_name_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_flags("--canopy-chunks", "ratio=0.3") == options.ReuseOptions(ratio=0.3)
    assert "--canopy-chunks is called --canopy-documents now" in caplog.text


def test_the_pages_flags_are_accepted() -> None:
    docs = Path(__file__).parents[3] / "docs"
    text = "".join((docs / part / "documents.md").read_text() for part in ("guide", "reference"))
    flag_values = re.findall(r"--canopy-documents ('[^']*'|[^\s`']+)", text)
    assert len(flag_values) >= 3
    for flag_value in flag_values:
        assert parse_flags("--canopy-documents", flag_value.strip("'")), flag_value


def test_whole_graphs_of_prefill_are_refused_in_both_spellings_and_others_are_not() -> None:
    """A replayed graph runs no Python: documents' KV would be ignored silently."""
    config = pytest.importorskip("sglang.srt.model_executor.cuda_graph_config")
    graph_config = config.default_cuda_graph_config()
    for prefill, decode, is_refused in (
        ("full", "disabled", True), ("breakable", "full", False), ("disabled", "full", False),
    ):  # fmt: skip
        graph_config.prefill.backend, graph_config.decode.backend = prefill, decode
        graph_config_dict = {"prefill": {"backend": prefill}, "decode": {"backend": decode}}
        for flags in (
            {"cuda_graph_config": graph_config},
            {"cuda_graph_config": graph_config_dict},
            {"cuda_graph_backend_prefill": prefill, "cuda_graph_backend_decode": decode},
        ):
            refusal = unsupported_reason(DOCUMENTS, argparse.Namespace(**flags), environment={})
            assert (refusal is not None) == is_refused, flags
            assert not is_refused or "--cuda-graph-backend-prefill breakable" in refusal
