"""An answer that calls a tool is recognised in the format of each of SGLang's tool parsers."""

from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from sglang_canopy.config.server_options import ATTRIBUTE, ServerOptions
from sglang_canopy.request.infer import infer_from_chat
from sglang_canopy.server.http.entry import tool_parser_field
from sglang_canopy.wire.stamp import FORCED_CALL
from support.live_tree import LiveTree, fake_req

HERMES = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
CODER = "<tool_call>\n<function=run>\n</function>\n</tool_call>"
GLM = "<tool_call>run\n<arg_key>a</arg_key>\n</tool_call>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n{}\n```"
DSML = '<｜DSML｜invoke name="run"></｜DSML｜invoke>'
BEAM = ' to=run<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="a">\nb\n</rfl:parameter><|call|>'
CALL_BY_PARSER = {
    **dict.fromkeys(("qwen", "qwen25", "hermes", "trinity", "mimo"), HERMES),
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige"), CODER),
    **dict.fromkeys(("glm", "glm45", "glm47", "ling3", "spark25", "poolside_v1"), GLM),
    **dict.fromkeys(("deepseekv3", "deepseekv31"), DEEPSEEK),
    **dict.fromkeys(("deepseekv32", "deepseekv4"), DSML),
    **dict.fromkeys(("beam", "response_template"), BEAM),
    "apertus2509": '<|tools_prefix|>[{"run": {}}]<|tools_suffix|>',
    "cohere_command4": '<|START_ACTION|>[{"tool_name": "run", "parameters": {}}]<|END_ACTION|>',
    "deepseekv41": '<｜DSML｜ invoke name="run"></｜DSML｜ invoke>',
    "dots": '<dots_function_call>{"name": "run", "arguments": {}}</dots_function_call>',
    "gemma4": "<|tool_call>call:run{}<tool_call|>",
    "gigachat3": 'function call<|role_sep|>\n{"name": "run", "arguments": {}}',
    "gigachat35": "<｜GCML｜tool_calls></｜GCML｜tool_calls>",
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.run<|message|>{}<|call|>",
    "hunyuan": "<tool_calls><tool_call>run</tool_call></tool_calls>",
    "inkling": '<|message_model|>run<|content_invoke_tool_json|>{"name": "run", "args": {}}',
    "interns1": '<|action_start|> <|plugin|>\n{"name": "run", "parameters": {}}<|action_end|>',
    "iquest_q1": "<iquest_tool_call>run</iquest_tool_call>",
    "k2_horizon": "<ifm|tool_call>run",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0",
    "kimi_k3": "<|open|>tools<|sep|>run",
    "lfm2": "<|tool_call_start|>[run()]<|tool_call_end|>",
    "llama3": '{"name": "run", "parameters": {}}',
    "minicpm5": '<function name="run"></function>',
    "minimax-m2": '<minimax:tool_call><invoke name="run"></invoke></minimax:tool_call>',
    "minimax-m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="run">',
    "mistral": "[TOOL_CALLS]run[ARGS]{}",
    "muse": '<atem:function_calls>\n<atem:invoke name="run"></atem:invoke>\n</atem:function_calls>',
    "pythonic": '[run(a="b")]',
    "step3": "<｜tool_calls_begin｜>run",
}


try:
    from sglang.srt.parser.beam import BEAM_RESPONSE_TEMPLATE
except ImportError:  # SGLang 0.5.22 has no such parser
    BEAM_RESPONSE_TEMPLATE = None


class CodePointTokenizer:
    """A tokenizer whose tokens are code points."""

    response_template = BEAM_RESPONSE_TEMPLATE

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def stop_reason(answer: str, parser: str | None, **fields: object) -> str | None:
    """Return the stop reason of an answer to a request that names ``parser`` in its stamp."""
    tree = LiveTree(1024, "wa")
    stamp = {"time": 1.0} | ({} if parser is None else {"tool_parser": parser})
    options = {"tokenizer": CodePointTokenizer(), **fields}
    req = fake_req(list(range(100)), list(map(ord, answer)), stamp, **options)
    request = tree.core.requests.register(req)
    tree.core.requests.report_end(req)
    return request.stop


@pytest.mark.parametrize("parser", FunctionCallParser.ToolCallParserEnum)
def test_a_call_in_any_parsers_format_is_recognised_and_text_is_not(parser: str) -> None:
    assert stop_reason(CALL_BY_PARSER[parser], parser) == "tool"
    assert stop_reason("The file has 12 lines.", parser) == "end"


def test_an_answer_is_no_call_without_tools_a_tokenizer_or_a_parser_of_this_model() -> None:
    assert stop_reason(HERMES, None) == "end"
    assert stop_reason(HERMES, "hermes", tokenizer=None) == "end"
    assert stop_reason(HERMES, "no-such-parser") == "end"
    finish_length = type("FINISH_LENGTH", (), {})()
    assert stop_reason(HERMES, "hermes", finished_reason=finish_length) == "length"


def test_a_forced_call_is_recognised_in_any_format() -> None:
    assert stop_reason('[{"name": "run", "parameters": {}}]', FORCED_CALL, tokenizer=None) == "tool"


@pytest.mark.parametrize(
    ("parser", "tools", "tool_choice", "stamp"),
    [
        ("hermes", [{}], "auto", {"tool_parser": "hermes"}),
        ("hermes", [{}], None, {"tool_parser": "hermes"}),
        ("hermes", [], "auto", {}),
        ("hermes", [{}], "none", {}),
        (None, [{}], "auto", {}),
        (None, [{}], "required", {"tool_parser": FORCED_CALL}),
        (None, [{}], {"type": "function", "name": "run"}, {"tool_parser": FORCED_CALL}),
    ],
)
def test_the_parser_is_sent_if_tools_may_be_called(parser, tools, tool_choice, stamp):
    assert tool_parser_field(parser, tools, tool_choice) == stamp


def test_an_agents_turns_on_v1_messages_show_its_tools_and_their_results() -> None:
    arguments = SimpleNamespace(radix_eviction_policy="wa")
    setattr(arguments, ATTRIBUTE, ServerOptions())  # the hook of another test's plugin reads both
    openai_serving = SimpleNamespace(
        supports_inline_system=True, tool_call_parser="hermes",
        tokenizer_manager=SimpleNamespace(server_args=arguments),
    )  # fmt: skip
    call = {"type": "tool_use", "id": "1", "name": "run", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "12 lines"}
    request = AnthropicMessagesRequest(
        model="m",
        max_tokens=1,
        tools=[{"name": "run", "input_schema": {"type": "object"}}],
        messages=[
            {"role": "user", "content": "count"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
    )
    body = AnthropicServing(openai_serving)._convert_to_chat_completion_request(request)
    assert infer_from_chat(body) == {"category": "chat-tools-after-tool", "turn": 2}
    assert tool_parser_field("hermes", body.tools, body.tool_choice) == {"tool_parser": "hermes"}
