"""Names of the benchmark's module are replaced for a run, and restored after it."""

import types

import pytest

from canopy_lab.live.replay.replay_run import replace_names


def test_names_are_restored_after_a_failure() -> None:
    module = types.SimpleNamespace(a=1, b=2)
    replaced_values = []

    def fail() -> None:
        with replace_names(module, a=10):
            replaced_values.append((module.a, module.b))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert replaced_values == [(10, 2)]
    assert (module.a, module.b) == (1, 2)


def test_a_name_that_the_module_lost_is_an_error() -> None:
    module = types.SimpleNamespace(a=1)
    with pytest.raises(AttributeError), replace_names(module, a=2, gone=3):
        pass
    assert module.a == 1
