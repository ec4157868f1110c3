"""Chat templates in the manner of eight families: what each trims, renames, quotes or drops."""

from pathlib import Path

import yaml

FIXTURES = Path(__file__).parents[1] / "fixtures"
_EXPRESSIONS = {
    "ROLE": "message['role']",
    "RAW": "message['content']",
    "TEXT": "message['content'] | trim",
    "JSON": "message['content'] | tojson",
    "LAST": "message['content'].split('</think>')[-1] | trim",
    "SYSTEM": "messages[0]['content'] if messages[0]['role'] == 'system' and loop.index0 == 1 else ''",
}
_PARTS_BY_FAMILY = yaml.safe_load((FIXTURES / "chat_templates.yaml").read_text(encoding="utf-8"))


def _template(parts: dict[str, str]) -> str:
    text = "{% if false %}"
    for role in ("system", "user", "assistant", "tool"):
        text += f"{{% elif message['role'] == '{role}' %}}{parts.get(role, parts['other'])}"
    for placeholder, expression in _EXPRESSIONS.items():
        text = text.replace(placeholder, f"{{{{ {expression} }}}}")
    messages = f"{{% for message in messages %}}{text}{{% endif %}}{{% endfor %}}"
    answer = f"{{% if add_generation_prompt %}}{parts['answer']}{{% endif %}}"
    return parts.get("first", "") + messages + answer


TEMPLATES = {family: _template(parts) for family, parts in _PARTS_BY_FAMILY.items()}
"""Jinja templates by family."""
