"""The examples that need a server, against a real one."""

from __future__ import annotations

import pytest

from support.example_files import load


@pytest.mark.long
def test_an_agent_hints_and_two_tenants_stay_apart(server, tiny_model):
    with server(tiny_model, "--radix-eviction", "wa", "--enable-cache-report") as client:
        answers = load("agent_loop").main(client.url, "Which leaf goes first?")
        assert len(answers) == 3
        found = load("two_tenants").main(client.url)
        assert found["ann"][0] == found["bob"][0] == 0
        assert found["ann"][1] == found["bob"][1] > 50
