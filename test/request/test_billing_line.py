"""Claude Code's billing line is left out of the prompt on ``/v1/messages``."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

from sglang_canopy.config.server_options import ATTRIBUTE, RequestOptions, ServerOptions
from sglang_canopy.server.http.entry import messages_converted

LINE = "x-anthropic-billing-header: cc_version=2.1.177.01c; cch=0f3a1;"
AGENT = "You are an agent.\nx-anthropic-billing-header: is a header."


def system_text(system: Any, policy: str = "wa", strip: str = "on") -> str | None:
    """Return the system text of the chat that SGLang makes of a request."""
    arguments = SimpleNamespace(radix_eviction_policy=policy)
    setattr(arguments, ATTRIBUTE, ServerOptions(RequestOptions(strip_billing_line=strip)))
    chat = SimpleNamespace(
        supports_inline_system=True, tokenizer_manager=SimpleNamespace(server_args=arguments)
    )
    serving = AnthropicServing(chat)
    user = {"role": "user", "content": "hi"}
    request = AnthropicMessagesRequest(model="m", max_tokens=1, messages=[user], system=system)
    messages_converted(serving, request)
    first = serving._convert_to_chat_completion_request(request).messages[0]
    return first.content if first.role == "system" else None


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ([{"type": "text", "text": LINE}, {"type": "text", "text": AGENT}], AGENT),
        (f"{LINE}\n{AGENT}", AGENT),
        (LINE, None),
        ([{"type": "text", "text": LINE}], None),
        (AGENT, AGENT),
        (None, None),
    ],
)
def test_only_the_line_is_left_out(system: Any, expected: str | None) -> None:
    assert system_text(system) == expected


def test_it_stays_with_the_flag_and_under_sglangs_policies() -> None:
    assert system_text(LINE, strip="off") == LINE
    assert system_text(LINE, policy="lru") == LINE
