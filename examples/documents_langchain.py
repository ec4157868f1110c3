"""LangChain: a chain that stuffs what was retrieved into a prompt, with the server's separator between.

    pip install langchain-openai langchain-classic
    sglang serve MODEL --canopy-documents '{"separator": "\\n###\\n"}'
    python examples/documents_langchain.py http://127.0.0.1:30000

The text between two separators is a document, so the first and the last document need one each outside. With nothing retrieved it is an ordinary prompt. Approximate: docs/guide/documents.md.
"""

import json
import sys
import time
import urllib.request
from typing import Any

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

SEPARATOR = "\n###\n"
RETRIEVED = [
    Document("Lisbon lies on the Tagus, and was rebuilt after an earthquake. " * 4),
    Document("Riga lies on the Daugava, and was a city of the Hanse. " * 4),
    Document("Quito lies at 2,850 metres, below a volcano. " * 4),
]
PROMPT = ChatPromptTemplate.from_messages(
    [("user", f"Answer from documents.{SEPARATOR}{{context}}{SEPARATOR}{{input}}")]
)


def main(url: str) -> dict[str, Any]:
    """The server's counters of documents after three questions."""
    model = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model="m", max_tokens=16)
    chain = create_stuff_documents_chain(model, PROMPT, document_separator=SEPARATOR)
    print(chain.invoke({"context": RETRIEVED, "input": "Which of them lies on the Tagus?"}))
    time.sleep(2)  # documents are encoded for later while the server has nothing else to do
    print(chain.invoke({"context": RETRIEVED[::-1], "input": "Which of them is the highest?"}))
    print(chain.invoke({"context": [], "input": "Which of them is the oldest?"}))
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
        counters: dict[str, Any] = json.load(answer)["internal_states"][0]["canopy_documents"]
    return counters


if __name__ == "__main__":
    counters = main(sys.argv[1].rstrip("/"))
    print(counters["reused_tokens"], "tokens reused;", counters["not_fused"])
