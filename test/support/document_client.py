"""Prompts of documents, and requests to a server that reuses their chunks."""

import json
import random
import time

from canopy_documents.server.engine import READINGS_PER_S

SEPARATOR = " # # "


def reuse_flag(**keys) -> tuple[str, str]:
    """The flag of a server that reuses documents."""
    return "--canopy-documents", json.dumps({"separator": SEPARATOR, **keys})


REUSE_FLAG = reuse_flag()
SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS = 20, 90, 15
ORDERS = [(1, 0, 2, 3), (2, 1, 3, 0), (3, 2, 0, 1), (1, 3, 2, 0)]
"""No order begins with document 0, as a first prompt does whose exact KV may be evicted."""


def tokens(token_count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 20_000) for _ in range(token_count)]


def prompt_of(order, question: int = 0, system: int = 0) -> tuple[list[int], list[int]]:
    """Return the tokens and bounds of a prompt: a system text, the numbered documents in ``order``, a question."""
    ids, bounds = tokens(SYSTEM_TOKENS, 900 + system), []
    for document in order:
        bounds += [len(ids), len(ids) + DOCUMENT_TOKENS]
        ids = ids + tokens(DOCUMENT_TOKENS, document)
    return ids + tokens(QUESTION_TOKENS, 500 + question), bounds


def query(client, ids, bounds, output_tokens: int = 6, **params):
    extra = {"extra_key": params.pop("extra_key")} if "extra_key" in params else {}
    fields = {"canopy_document_bounds": bounds, **params}
    return client.generate(ids, output_tokens, custom_params=fields, **extra)


def report_of(answer) -> dict:
    """Return the part of an answer that says which tokens were reused."""
    return answer["meta_info"]["canopy_documents"][0]


def counters_of(client) -> dict:
    return json.loads(client.get("/server_info"))["internal_states"][0]["canopy_documents"]


def send_and_encode(client, orders, **params) -> None:
    """Send prompts once and let the server encode their chunks (it does so when idle)."""
    for order in orders:
        query(client, *prompt_of(order), 1, **params)
    wait_until_encoded(client)


def wait_until_encoded(client) -> None:
    """Wait until the server has encoded every missing chunk."""
    while True:
        time.sleep(1.05 / READINGS_PER_S)  # the server renews these counters at this rate
        counters = counters_of(client)
        if not counters["waiting_documents"] and not counters["waiting_tokens"]:
            return
