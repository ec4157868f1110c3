"""A client's own logit processor receives the parameters that its client sent, and no others."""

from typing import Any

import pytest

from support.prompts import token_ids

pytestmark = pytest.mark.xdist_group("canopy")
WANTED = 777
NO_PARAMS = 555


SOURCE = """
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class Biases(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in enumerate(custom_param_list or []):
            if params is None:
                logits[row, 555] += 1000.0
            for key, value in (params or {}).items():
                if key != "__req__":
                    logits[row, int(key)] += float(value)
        return logits
"""
"""A processor whose parameters are token ids and biases: any other key ends the scheduler."""


def serialised() -> str:
    """The processor as if defined in ``__main__``: a server cannot import this file."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE, names)
    text: str = names["Biases"].to_str()
    return text


@pytest.mark.parametrize("policy", ["wa", pytest.param("lru", marks=pytest.mark.long)])
def test_a_processor_receives_its_clients_parameters_alone(request, policy):
    if policy == "wa":
        client = request.getfixturevalue("canopy_server")
    else:
        flags = ("--radix-eviction", policy, "--enable-custom-logit-processor")
        model = request.getfixturevalue("tiny_model")
        client = request.getfixturevalue("shared_server")(model, *flags, kv_tokens=2048)
    biases = {str(WANTED): 1000.0}

    def answered(params: dict[str, Any] | None, **sampling: Any) -> list[int]:
        body = {"input_ids": token_ids(50, 1), "custom_logit_processor": serialised()}
        given = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True, **sampling}
        if params is not None:
            given["custom_params"] = params
        answer = client.post("/generate", {**body, "sampling_params": given})
        first = answer[0] if isinstance(answer, list) else answer
        return first["output_ids"]

    assert answered(biases) == [WANTED] * 2
    assert answered({**biases, "canopy_category": "chat", "canopy_turn": 2}) == [WANTED] * 2
    assert answered(None) == [NO_PARAMS] * 2
    assert answered(biases, n=2, temperature=1.0) == [WANTED] * 2
    assert answered({}) != [NO_PARAMS] * 2
    assert "Scheduler hit an exception" not in client.server.log_text()
