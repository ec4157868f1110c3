"""Prompts that end a server are refused, and Claude Code's billing line is left out of the system text."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_canopy.config.server_options import ATTRIBUTE, RequestOptions, ServerOptions
from sglang_canopy.errors import CanopyError
from sglang_canopy.request.prompt import MAX_SAMPLES, check_message, check_prompt, check_sizes
from sglang_canopy.server.http.entry import drop_billing_line

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


def check_request(**fields: Any) -> None:
    """Check a request as SGLang's tokenizer manager does; one token for each character of a text."""
    obj = GenerateReqInput(**{"sampling_params": {}} | fields)
    check_sizes(obj)
    obj.normalize_batch_and_arguments()
    for part in [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]:
        check_prompt(MANAGER, part, part.input_ids if part.text is None else [1] * len(part.text))
        copied_fields = ("return_logprob", "logprob_start_len", "positional_embed_overrides")
        message = {name: getattr(part, name) for name in copied_fields}
        message["session_params"] = SessionParams(**(part.session_params or {}))
        message["sampling_params"] = SamplingParams(**part.sampling_params)
        check_message(SimpleNamespace(**message), MANAGER)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ["a", "b"]},
        {"text": ["a", "b"], "sampling_params": [{}, {"n": 1}]},
        {"text": "a", "sampling_params": {"n": 4}},
        {"input_ids": [0, 99], "return_logprob": True, "top_logprobs_num": 100},
        {"input_ids": [[0], [99, 5]], "sampling_params": [{}, {}, {}]},
        {"text": "a", "logprob_start_len": -9},
        {"text": "a", "return_logprob": True, "logprob_start_len": -1},
        {"text": "a", "positional_embed_overrides": PositionalEmbeds(torch.zeros(1, 2), [0])},
        {"input_ids": [], "session_params": {"id": "s"}},
        {"input_ids": [500], "lora_path": "adapter"},
        {"input_ids": [500], "image_data": ["image"]},
        {"text": "a", "sampling_params": {"temperature": 0, "top_k": 2**40, "max_new_tokens": 8.0}},
        {"text": "a", "sampling_params": {"stop_token_ids": [-1, "5", 10**9], "json_schema": {}}},
        {"text": "a", "sampling_params": {"logit_bias": {"5": 2, "6": float("-inf"), "7": -1e300}}},
        {
            "text": "a",
            "sampling_params": {"temperature": 0, "logit_bias": {"5": 1e39, "6": 10**39}},
        },
    ],
)
def test_computable_requests_are_accepted(fields: dict[str, Any]) -> None:
    check_request(**fields)


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
        ({"text": "", "session_id": "s"}, "has no tokens"),
        ({"text": "a", "top_logprobs_num": 101}, "101 top log-probabilities"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "at least -1, got -2"),
        ({"text": "a", "session_params": {"id": ["s"]}}, "'id' must be a string, got"),
        ({"text": "a", "positional_embed_overrides": {"a": 1}}, "must be tensors, got {'a': 1}"),
        *(
            ({"text": "a", "sampling_params": params}, f"key '{next(iter(params))}' must be")
            for params in (
                {"json_schema": {"type": "object"}},
                {"regex": ["a"]},
                {"top_k": 2**31},
                {"stop_token_ids": [101], "min_new_tokens": 1},
                {"stop_token_ids": ["-1"], "min_new_tokens": 1},
                {"stream_interval": "2"},
                {"logit_bias": {"5": "1"}},
                {"logit_bias": {"5": 1e39}},
                {"logit_bias": {"5": float("nan")}},
                {"logit_bias": {"5": -(10**400)}},
                {"logit_bias": []},
            )
        ),
        ({"text": "a", "sampling_params": {"n": MAX_SAMPLES + 1}}, "send several requests"),
        ({"text": ["a"] * 3, "sampling_params": {"n": MAX_SAMPLES // 2}}, "send several requests"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "a list of 1 for 2 prompts"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "a list of 1 for 2 prompts"),
    ],
)
def test_a_request_that_ends_a_server_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CanopyError, match=reason):
        check_request(**fields)


def test_no_client_skips_sglangs_checks() -> None:
    params = {"is_normalized": True, "stop_token_ids": 5}
    check_sizes(GenerateReqInput(text="a", sampling_params=params))
    assert params == {"stop_token_ids": 5}


def test_requests_for_and_of_embeddings_are_accepted() -> None:
    check_prompt(MANAGER, EmbeddingReqInput(text=""), [])
    check_prompt(MANAGER, GenerateReqInput(input_embeds=[[0.5]]), None)


BILLING_LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cch=0f3a1;"
PROMPT = "You are an agent.\nx-anthropic-billing-header: is a header."


def system_text(system: Any, policy: str = "wa", strip_mode: str = "on") -> str | None:
    """Return the system text of the chat that SGLang makes of a request."""
    arguments = SimpleNamespace(radix_eviction_policy=policy)
    setattr(arguments, ATTRIBUTE, ServerOptions(RequestOptions(strip_billing_line=strip_mode)))
    manager = SimpleNamespace(server_args=arguments)
    chat = SimpleNamespace(supports_inline_system=True, tokenizer_manager=manager)
    serving = AnthropicServing(chat)
    user = {"role": "user", "content": "hi"}
    request = AnthropicMessagesRequest(model="m", max_tokens=1, messages=[user], system=system)
    drop_billing_line(serving, request)
    first_message = serving._convert_to_chat_completion_request(request).messages[0]
    return first_message.content if first_message.role == "system" else None


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ([{"type": "text", "text": BILLING_LINE}, {"type": "text", "text": PROMPT}], PROMPT),
        (f"{BILLING_LINE}\n{PROMPT}", PROMPT),
        (BILLING_LINE, None),
        ([{"type": "text", "text": BILLING_LINE}], None),
        (PROMPT, PROMPT),
        (None, None),
    ],
)
def test_only_the_billing_line_is_left_out(system: Any, expected: str | None) -> None:
    assert system_text(system) == expected


def test_a_billing_line_stays_with_the_flag_and_under_sglangs_policies() -> None:
    assert system_text(BILLING_LINE, strip_mode="off") == BILLING_LINE
    assert system_text(BILLING_LINE, policy="lru") == BILLING_LINE
