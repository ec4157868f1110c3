"""Requests that end or stop a server of SGLang's are refused on every route; all others pass."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.prompt import MAX_SAMPLES, check_prompt, check_sizes

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


def check(**fields: Any) -> None:
    """Check a request as SGLang's tokenizer manager does; one token for each character of a text."""
    obj = GenerateReqInput(**{"sampling_params": {}} | fields)
    check_sizes(obj)
    obj.normalize_batch_and_arguments()
    for one in [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]:
        check_prompt(MANAGER, one, one.input_ids if one.text is None else [1] * len(one.text))


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ["a", "b"]},
        {"text": ["a", "b"], "sampling_params": [{}, {"n": 1}]},
        {"text": "a", "sampling_params": {"n": 4}},
        {"input_ids": [0, 99], "return_logprob": True, "top_logprobs_num": 100},
        {"input_ids": [[0], [99, 5]], "sampling_params": [{}, {}, {}]},
        {"input_ids": [], "session_params": {"id": "s"}},
        {"input_ids": [500], "lora_path": "adapter"},
        {"input_ids": [500], "image_data": ["image"]},
    ],
)
def test_computable_values_pass(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input_ids": [-5]}, "has the token -5; this model's are from 0 to 99"),
        ({"input_ids": [3, 100]}, "has the token 100;"),
        ({"input_ids": [[1, 2], [3, -1]]}, "has the token -1;"),
        ({"input_ids": [-5], "image_data": ["image"]}, "has the token -5;"),
        ({"text": ""}, "has no tokens"),
        ({"text": ["a", ""]}, "has no tokens"),
        ({"input_ids": [[]]}, "has no tokens"),
        ({"text": "a", "top_logprobs_num": 101}, "101 top log-probabilities"),
        ({"text": "a", "sampling_params": {"n": MAX_SAMPLES + 1}}, "send several requests"),
        ({"text": ["a"] * 3, "sampling_params": {"n": MAX_SAMPLES // 2}}, "send several requests"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "a list of 1 for 2 prompts"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "a list of 1 for 2 prompts"),
    ],
)
def test_a_request_that_ends_a_server_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CanopyError, match=reason):
        check(**fields)


def test_requests_for_embeddings_and_of_embeddings_pass() -> None:
    check_prompt(MANAGER, EmbeddingReqInput(text=""), [])
    check_prompt(MANAGER, GenerateReqInput(input_embeds=[[0.5]]), None)
