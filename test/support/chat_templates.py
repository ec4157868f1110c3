"""Chat templates in the manner of eight families: what each trims, renames, quotes or drops."""

_VALUES = {
    "ROLE": "message['role']",
    "RAW": "message['content']",
    "TEXT": "message['content'] | trim",
    "JSON": "message['content'] | tojson",
    "LAST": "message['content'].split('</think>')[-1] | trim",
    "SYSTEM": "messages[0]['content'] if messages[0]['role'] == 'system' and loop.index0 == 1 else ''",
}
_HEADER = "<|start_header_id|>ROLE<|end_header_id|>\n\n"
_BAR = "\uff5c"
_FORMS = {
    "chatml": {
        "assistant": "<|im_start|>assistant\nLAST<|im_end|>\n",
        "tool": "<|im_start|>user\n<tool_response>\nTEXT\n</tool_response><|im_end|>\n",
        "other": "<|im_start|>ROLE\nTEXT<|im_end|>\n",
        "answer": "<|im_start|>assistant\n",
    },
    "deepseek": {
        "first": f"<{_BAR}begin\u2581of\u2581sentence{_BAR}>",
        "system": "TEXT",
        "assistant": f"<{_BAR}Assistant{_BAR}>LAST<{_BAR}end\u2581of\u2581sentence{_BAR}>",
        "tool": f"<{_BAR}tool\u2581output\u2581begin{_BAR}>TEXT<{_BAR}tool\u2581output\u2581end{_BAR}>",
        "other": f"<{_BAR}User{_BAR}>TEXT",
        "answer": f"<{_BAR}Assistant{_BAR}>",
    },
    "gemma": {
        "first": "<bos>",
        "assistant": "<start_of_turn>model\nTEXT<end_of_turn>\n",
        "other": "<start_of_turn>user\nTEXT<end_of_turn>\n",
        "answer": "<start_of_turn>model\n",
    },
    "glm": {
        "first": "[gMASK]<sop>",
        "assistant": "<|assistant|>\n<think></think>\nLAST",
        "tool": "<|observation|>\n<tool_response>\nTEXT\n</tool_response>",
        "other": "<|ROLE|>\nRAW",
        "answer": "<|assistant|>",
    },
    "granite": {
        "other": "<|start_of_role|>ROLE<|end_of_role|>RAW<|end_of_text|>\n",
        "answer": "<|start_of_role|>assistant<|end_of_role|>",
    },
    "llama": {
        "first": "<|begin_of_text|>",
        "tool": "<|start_header_id|>ipython<|end_header_id|>\n\nJSON<|eot_id|>",
        "other": f"{_HEADER}TEXT<|eot_id|>",
        "answer": _HEADER.replace("ROLE", "assistant"),
    },
    "mistral": {
        "first": "<s>",
        "system": "",
        "user": "[INST] SYSTEM RAW[/INST]",
        "assistant": " TEXT</s>",
        "other": "[TOOL_RESULTS] RAW[/TOOL_RESULTS]",
        "answer": "",
    },
    "phi": {"other": "<|ROLE|>RAW<|end|>", "answer": "<|assistant|>"},
}
"""A message's form by its role, the text before all, and the text before an answer."""


def _template(forms: dict[str, str]) -> str:
    text = "{% if false %}"
    for role in ("system", "user", "assistant", "tool"):
        text += f"{{% elif message['role'] == '{role}' %}}{forms.get(role, forms['other'])}"
    for name, value in _VALUES.items():
        text = text.replace(name, f"{{{{ {value} }}}}")
    messages = f"{{% for message in messages %}}{text}{{% endif %}}{{% endfor %}}"
    answer = f"{{% if add_generation_prompt %}}{forms['answer']}{{% endif %}}"
    return forms.get("first", "") + messages + answer


TEMPLATES = {family: _template(forms) for family, forms in _FORMS.items()}
"""Jinja templates by family."""
