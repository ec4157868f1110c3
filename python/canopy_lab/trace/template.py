"""Split a prompt that a chat template rendered into the parts of ``chat.py``.

Logs of servers hold prompts as the model receives them. Role markers of ChatML, Llama, Gemma, GPT-OSS,
GLM, DeepSeek and Mistral are recognised; another prompt is one part. Tools on lines of their own
inside a system prompt become parts, so that their order can be compared.
"""

from __future__ import annotations

import re

from canopy_lab.trace.chat import PromptPart
from canopy_lab.trace.prompts import LoggedPrompt

_ROLE_MARK = re.compile(
    r"<\|(?:im_start|start|turn|start_header_id)\|>(?P<chatml>\w+)"
    r"|<start_of_turn>(?P<gemma>\w+)"
    r"|<[|\uff5c](?P<glm>system|user|assistant|tool|observation)[|\uff5c]>"
    r"|\[(?P<mistral>INST|AVAILABLE_TOOLS|SYSTEM_PROMPT|TOOL_RESULTS)\]",
    re.I,
)
_ROLE_NAMES = {
    **{"model": "assistant", "observation": "tool", "ipython": "tool", "developer": "system"},
    **{"inst": "user", "available_tools": "system", "system_prompt": "system", "tool_results": "tool"},
}  # fmt: skip
_TOOL_LINE = re.compile(r'^\{"(?:type|name|function|description)":.*\n?', re.M)


def prompt_parts(prompt: LoggedPrompt) -> tuple[PromptPart, ...]:
    """Return a prompt's parts; empty for a prompt of token ids."""
    if prompt.parts or not prompt.text:
        return prompt.parts
    return split_template(prompt.text)


def split_template(text: str) -> tuple[PromptPart, ...]:
    """Return the parts of a rendered prompt; their texts joined are ``text``."""
    marks = list(_ROLE_MARK.finditer(text))
    if not marks:
        return (PromptPart("text", "user", text),)
    parts = []
    if marks[0].start():
        parts.append(PromptPart("text", "system", text[: marks[0].start()]))
    for mark, following in zip(marks, [*marks[1:], None]):
        end = len(text) if following is None else following.start()
        name = (mark["chatml"] or mark["gemma"] or mark["glm"] or mark["mistral"]).lower()
        role, body = _ROLE_NAMES.get(name, name), text[mark.start() : end]
        parts += _with_tools(body) if role == "system" else [PromptPart("text", role, body)]
    return tuple(parts)


def _with_tools(body: str) -> list[PromptPart]:
    """Return a system prompt as parts, with its tools separate."""
    parts, start = [], 0
    for tool in _TOOL_LINE.finditer(body):
        if tool.start() > start:
            parts.append(PromptPart("text", "system", body[start : tool.start()]))
        parts.append(PromptPart("tool", "tools", tool[0]))
        start = tool.end()
    if start < len(body):
        parts.append(PromptPart("text", "system", body[start:]))
    return parts
