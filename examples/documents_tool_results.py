"""Results of tools as documents: what a search tool answered once is reused in later conversations.

    sglang serve MODEL --canopy-chunks on
    python examples/documents_tool_results.py http://127.0.0.1:30000

``canopy_documents`` is set once, for every turn; a turn without results is an ordinary prompt.
Approximate: docs/guide/documents.md.
"""

import sys
import time
from typing import Any

from openai import OpenAI

RESULTS = {
    "lisbon": "Lisbon lies on the Tagus, and was rebuilt after an earthquake. " * 4,
    "riga": "Riga lies on the Daugava, and was a city of the Hanse. " * 4,
    "quito": "Quito lies at 2,850 metres, below a volcano. " * 4,
}


def conversation(question: str, searches: list[str]) -> list[dict[str, Any]]:
    """A question, the model's calls of ``search``, and what each answered."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for number, name in enumerate(searches):
        call = {"name": "search", "arguments": f'{{"city": "{name}"}}'}
        calls = [{"id": f"call-{number}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        result = {"role": "tool", "tool_call_id": f"call-{number}", "content": RESULTS[name]}
        messages.append(result)
    return messages


def ask(client: OpenAI, model: str, messages: list[dict[str, Any]]) -> Any:
    """The documents in the usage of the answer; ``None`` of a prompt without any."""
    answer = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=16,
        extra_body={"custom_params": {"canopy_documents": "parts"}},
    )
    details = answer.usage and answer.usage.prompt_tokens_details
    return details.model_dump().get("canopy_documents") if details else None


def main(url: str) -> list[Any]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    question = "Which of these cities is the highest?"
    told = [ask(client, model, conversation(question, ["lisbon", "riga", "quito"]))]
    time.sleep(2)  # documents are encoded for later while the server has nothing else to do
    told.append(ask(client, model, conversation(question, ["quito", "lisbon", "riga"])))
    told.append(ask(client, model, conversation(question, [])))
    return told


if __name__ == "__main__":
    for usage in main(sys.argv[1].rstrip("/")):
        print(usage or "no documents")
