"""The examples that need a server, against a real one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_an_agent_hints_and_two_tenants_stay_apart(server, tiny_model):
    with server(tiny_model, "--radix-eviction", "wa", "--enable-cache-report") as client:
        answers = load("agent_loop").main(client.url, "Which leaf goes first?")
        assert len(answers) == 3
        found = load("two_tenants").main(client.url)
        assert found["ann"][0] == found["bob"][0] == 0
        assert found["ann"][1] == found["bob"][1] > 50
