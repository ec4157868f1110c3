"""Prompts that no model can compute are refused at the entry; all others pass."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.prompt import check_prompts

VOCABULARY = 100


def check(**fields: Any) -> None:
    check_prompts(GenerateReqInput(**fields), VOCABULARY)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "hello"},
        {"text": ["a", "b"], "sampling_params": {}},
        {"text": ["a", "b"], "sampling_params": [{}, {}]},
        {"input_ids": [0, 99]},
        {"input_ids": [[0], [99, 5]], "sampling_params": [{}, {}, {}]},
        {"input_ids": []},
        {"input_ids": [500], "lora_path": "adapter"},
        {"input_ids": [500], "image_data": ["image"]},
        {"input_embeds": [[0.5]]},
    ],
)
def test_computable_values_pass(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"input_ids": [-5]}, "-5"),
        ({"input_ids": [3, 100]}, "100"),
        ({"input_ids": [[1, 2], [3, -1]]}, "-1"),
        ({"input_ids": [-5], "image_data": ["image"]}, "-5"),
    ],
)
def test_a_token_that_does_not_exist_is_named(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(CanopyError, match=f"has the token {wrong}; this model's are from 0 to 99"):
        check(**fields)


@pytest.mark.parametrize("prompts", [{"text": ["a", "b"]}, {"input_ids": [[1], [2]]}])
def test_fewer_sampling_parameters_than_prompts_are_refused(prompts: dict[str, Any]) -> None:
    with pytest.raises(CanopyError, match="a list of 1 for 2 prompts"):
        check(**prompts, sampling_params=[{}])


def test_a_request_for_embeddings_has_no_text_or_tokens() -> None:
    check_prompts(SimpleNamespace(sampling_params={}), VOCABULARY)
