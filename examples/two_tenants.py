"""Two tenants on one server: each finds its own prompt in the cache, and never the other's.

    sglang serve MODEL --radix-eviction wa --enable-cache-report
    python examples/two_tenants.py http://127.0.0.1:30000

In production a gateway sets the salt; a client must not choose it (docs/guide/security.md).
"""

import sys

from openai import OpenAI

PROMPT = "The cache keeps what is asked for again. " * 40


def cached_tokens(client: OpenAI, model: str, salt: str) -> int:
    """Prompt tokens hit in the cache of the tenant with this salt."""
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=1, extra_body={"cache_salt": salt}
    )
    details = answer.usage.prompt_tokens_details if answer.usage else None
    return (details.cached_tokens or 0) if details else 0


def main(url: str) -> dict[str, list[int]]:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    tokens_by_tenant: dict[str, list[int]] = {"ann": [], "bob": []}
    for tenant in ("ann", "ann", "bob", "bob"):
        salt = f"{tenant}-4f1c8d0a9b7e6253"  # your gateway's: random, 16 bytes or more
        tokens_by_tenant[tenant].append(cached_tokens(client, model, salt))
    return tokens_by_tenant


if __name__ == "__main__":
    for tenant, tokens in main(sys.argv[1].rstrip("/")).items():
        print(f"{tenant}: {tokens[0]} tokens cached at first, {tokens[1]} when asked again")
