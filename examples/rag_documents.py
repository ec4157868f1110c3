"""RAG: the same documents in another order, and how much of their KV was reused.

    sglang serve MODEL --canopy-documents on
    python examples/rag_documents.py http://127.0.0.1:30000

Approximate, and off by default: docs/guide/documents.md has its cost in quality.
"""

import sys
import time
from typing import Any

from openai import OpenAI

CITIES = {
    "Lisbon": "It lies on the Tagus, was rebuilt after the earthquake of 1755, and has yellow trams.",
    "Riga": "It lies on the Daugava, was a city of the Hanse, and has many houses of Jugendstil.",
    "Quito": "It lies at 2,850 metres below a volcano, and was the first of the World Heritage sites.",
}
DOCUMENTS = [f"{city}. {text} " + f"So much is known of {city}. " * 4 for city, text in CITIES.items()]  # fmt: skip


def report_of(client: OpenAI, model: str, documents: list[str], question: str) -> dict[str, Any]:
    """What became of the documents' KV; the question comes behind the documents."""
    parts: list[Any] = [{"type": "text", "text": text} for text in (*documents, question)]
    body = {"custom_params": {"canopy_documents": "parts"}, "return_meta_info": True}
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": parts}], max_tokens=16, extra_body=body
    )
    return answer.model_dump()["choices"][0]["meta_info"]["canopy_documents"][0]


def main(url: str) -> list[dict[str, Any]]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    first, second, third = DOCUMENTS
    reports = [report_of(client, model, [first, second, third], "Which of them lies on the Tagus?")]
    time.sleep(2)  # documents are encoded for later while the server has nothing else to do
    reports.append(
        report_of(client, model, [third, first, second], "Which of them is the highest?")
    )
    return reports


if __name__ == "__main__":
    for answer in main(sys.argv[1].rstrip("/")):
        if answer.get("fused"):
            print(f"{answer['reused']} tokens reused, {answer['recomputed']} of documents computed")
        else:
            print(f"computed as usual: {answer.get('why')}")
