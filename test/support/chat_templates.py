"""Chat templates in the manner of eight families: what each trims, renames, quotes or drops."""

from pathlib import Path

import yaml

FIXTURES = Path(__file__).parents[1] / "fixtures"
_VALUES = {
    "ROLE": "message['role']",
    "RAW": "message['content']",
    "TEXT": "message['content'] | trim",
    "JSON": "message['content'] | tojson",
    "LAST": "message['content'].split('</think>')[-1] | trim",
    "SYSTEM": "messages[0]['content'] if messages[0]['role'] == 'system' and loop.index0 == 1 else ''",
}
_FORMS = yaml.safe_load((FIXTURES / "chat_templates.yaml").read_text(encoding="utf-8"))


def _template(forms: dict[str, str]) -> str:
    text = "{% if false %}"
    for role in ("system", "user", "assistant", "tool"):
        text += f"{{% elif message['role'] == '{role}' %}}{forms.get(role, forms['other'])}"
    for placeholder, value in _VALUES.items():
        text = text.replace(placeholder, f"{{{{ {value} }}}}")
    messages = f"{{% for message in messages %}}{text}{{% endif %}}{{% endfor %}}"
    answer = f"{{% if add_generation_prompt %}}{forms['answer']}{{% endif %}}"
    return forms.get("first", "") + messages + answer


TEMPLATES = {family: _template(forms) for family, forms in _FORMS.items()}
"""Jinja templates by family."""
