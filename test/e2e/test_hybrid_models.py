"""Models with sliding windows and with recurrent states, served: transformers' own text, and hits."""

from __future__ import annotations

import pytest

from support.hybrid_models import ANSWER, KINDS, agrees, build, conversations, greedy


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_transformers_and_sglangs_and_prefixes_are_found(server, smollm2, tmp_path, kind):
    model = build(kind, tmp_path / kind, smollm2)
    prompts = conversations()
    expected = [greedy(model, prompt, ANSWER) for prompt in prompts]
    flags = ("--max-mamba-cache-size", "12") if kind == "states" else ()
    found = {}
    for policy in ("lru", "wa"):
        more = (
            ("--radix-eviction-policy-config", '{"states": "worth"}')
            if (policy, kind) == ("wa", "states")
            else ()
        )
        chosen = ("--radix-eviction-policy" if policy == "lru" else "--radix-eviction", policy)
        with server(tmp_path / kind, *chosen, *flags, *more, kv_tokens=1200) as client:
            answers = [client.generate(prompt, ANSWER) for prompt in prompts]
            assert agrees([answer["output_ids"] for answer in answers], expected), policy
            again = client.generate(prompts[-1], ANSWER)
            assert again["output_ids"] == answers[-1]["output_ids"]
            assert again["meta_info"]["cached_tokens"] > 200
            found[policy] = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
            assert "Traceback" not in client.server.log_text()
            if policy == "wa":
                assert "CanopyTreeCore" in client.server.log_text()
    assert found["lru"] > 0
    assert found["wa"] >= 0.9 * found["lru"], found
