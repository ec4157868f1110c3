"""Documents in a field of their own, as Cohere's chat has it: a list beside the messages.

    sglang serve MODEL --canopy-chunks on
    python examples/documents_field.py http://127.0.0.1:30000

An empty list, when a search has found nothing, is an ordinary prompt. Approximate: docs/guide/documents.md.
"""

import sys
import time
from typing import Any

from openai import OpenAI

PLACES = [
    {"title": "Lisbon", "text": "It lies on the Tagus, and was rebuilt after an earthquake. " * 4},
    {"title": "Riga", "text": "It lies on the Daugava, and was a city of the Hanse. " * 4},
    {"title": "Quito", "text": "It lies at 2,850 metres, below a volcano. " * 4},
]


def ask(client: OpenAI, model: str, documents: list[dict[str, str]], question: str) -> Any:
    """The documents in the usage of the answer; ``None`` of a prompt without any."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=16,
        extra_body={"documents": documents},
    )
    details = answer.usage and answer.usage.prompt_tokens_details
    return details.model_dump().get("canopy_documents") if details else None


def main(url: str) -> list[Any]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    told = [ask(client, model, PLACES, "Which of them lies on the Tagus?")]
    time.sleep(2)  # documents are encoded for later while the server has nothing else to do
    told.append(ask(client, model, PLACES[::-1], "Which of them is the highest?"))
    told.append(ask(client, model, [], "Which of them is the oldest?"))
    return told


if __name__ == "__main__":
    for usage in main(sys.argv[1].rstrip("/")):
        print(usage or "no documents")
