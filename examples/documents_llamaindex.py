"""LlamaIndex: retrieved nodes as documents, by the server's separator in their template.

    pip install llama-index-core llama-index-llms-openai-like
    sglang serve MODEL --canopy-chunks 'separator=###'
    python examples/documents_llamaindex.py http://127.0.0.1:30000

The text between two separators is a document: each node begins with one, and one stands behind the
last. With nothing retrieved LlamaIndex asks nothing. Approximate: docs/guide/documents.md.
"""

import sys
import time
from typing import Any

from llama_index.core import PromptTemplate
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.openai_like import OpenAILike

SEPARATOR = "###"
FOUND = {
    "Lisbon": "It lies on the Tagus, and was rebuilt after an earthquake. " * 4,
    "Riga": "It lies on the Daugava, and was a city of the Hanse. " * 4,
    "Quito": "It lies at 2,850 metres, below a volcano. " * 4,
}
PROMPT = PromptTemplate(f"Answer from documents.\n{{context_str}}\n\n{SEPARATOR}\n{{query_str}}")


def retrieved(cities: list[str]) -> list[NodeWithScore]:
    """Nodes as a retriever returns them. The template is used where a node has metadata."""
    made = [TextNode(text=FOUND[city], metadata={"city": city}) for city in cities]
    for node in made:
        node.text_template = SEPARATOR + "\n{metadata_str}\n{content}"
    return [NodeWithScore(node=node) for node in made]


class Told(OpenAILike):
    """The model, which keeps the documents in the usage of each answer."""

    def chat(self, messages: Any, **more: Any) -> Any:
        answer = super().chat(messages, **more)
        details = answer.raw.usage.prompt_tokens_details
        _told.append(details.model_dump().get("canopy_documents") if details else None)
        return answer


_told: list[Any] = []


def main(url: str) -> list[Any]:
    model = Told(model="m", api_base=f"{url}/v1", api_key="none", is_chat_model=True, max_tokens=16)
    synthesizer = get_response_synthesizer(
        llm=model, text_qa_template=PROMPT, response_mode="compact"
    )
    _told.clear()
    synthesizer.synthesize("Which of them lies on the Tagus?", retrieved(list(FOUND)))
    time.sleep(2)  # documents are encoded for later while the server has nothing else to do
    synthesizer.synthesize("Which of them is the highest?", retrieved([*FOUND][::-1]))
    return list(_told)


if __name__ == "__main__":
    for usage in main(sys.argv[1].rstrip("/")):
        print(usage or "no documents")
