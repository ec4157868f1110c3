"""A model with pictures (Qwen2-VL): the text equals that under SGLang's policy; pictures are distinct."""

from typing import Any

import pytest

from support.vision_models import PICTURE, picture, write_vision_model

BEFORE = "Here is what was seen on the way home, told in the order in which it happened: "
CAT, DOG = 1, 2


def ask(client: Any, seed: int, question: str) -> dict[str, Any]:
    body = {
        "text": f"{BEFORE}{PICTURE} {question}",
        "image_data": [picture(seed)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "return_logprob": True,
    }
    return client.post("/generate", body)


@pytest.mark.long
def test_pictures_are_distinguished_with_equal_text(server, smollm2, tmp_path) -> None:
    model = write_vision_model(tmp_path / "model", smollm2)
    answers, chances, found = {}, {}, {}
    for policy in ("lru", "wa"):
        options = ("--radix-eviction", policy, "--skip-server-warmup")
        with server(model, *options, kv_tokens=2048) as client:
            asked = [(CAT, "Who is it?"), (CAT, "Who is it?"), (DOG, "Who is it?"), (CAT, "Where?")]
            every = [ask(client, *one) for one in asked]
            answers[policy] = [answer["output_ids"] for answer in every]
            chances[policy] = [
                [p for p, *_ in a["meta_info"]["output_token_logprobs"]] for a in every
            ]
            found[policy] = [answer["meta_info"]["cached_tokens"] for answer in every]
            # Before it is ready, SGLang may log failed connections to itself.
            assert "Traceback" not in client.server.log_text().partition("ready to roll")[2]
    assert answers["wa"] == answers["lru"]
    first, again, other, _ = chances["wa"]
    assert first == pytest.approx(again, abs=1e-4)
    assert first != pytest.approx(other, abs=1e-3), "the picture changes nothing"
    assert found["wa"] == found["lru"]
    first, again, other, question = found["wa"]
    assert first == 0
    assert again > question > other > 0, "a picture's KV is found with that picture alone"
