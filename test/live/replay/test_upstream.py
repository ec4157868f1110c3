"""The benchmark's module gets other names for a run, and its own back."""

import types

import pytest

from canopy_lab.live.replay.replay_run import replaced


def test_names_are_back_after_the_block_even_after_a_failure() -> None:
    module = types.SimpleNamespace(a=1, b=2)
    seen = []

    def fail() -> None:
        with replaced(module, a=10):
            seen.append((module.a, module.b))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert seen == [(10, 2)]
    assert (module.a, module.b) == (1, 2)


def test_a_name_that_the_module_lost_is_noticed() -> None:
    module = types.SimpleNamespace(a=1)
    with pytest.raises(AttributeError), replaced(module, a=2, gone=3):
        pass
    assert module.a == 1
