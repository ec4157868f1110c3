"""Installing CPU support: once, only without CUDA, and with a named reason when it cannot be."""

import os
import subprocess
import sys

import pytest
import torch

import canopy_cpu as cpu
from sglang_canopy import SGLANG_VERSION
from sglang_canopy.errors import CanopyError


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"} | environment
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True
    )


def test_installing_twice_has_no_further_effect():
    from sglang.srt.plugins.hook_registry import HookRegistry

    cpu.install()
    hooks_before = {target: list(hooks) for target, hooks in HookRegistry._hooks.items()}
    cpu.install()
    assert hooks_before == {target: list(hooks) for target, hooks in HookRegistry._hooks.items()}


def test_nothing_is_installed_or_imported_where_torch_has_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_installed", False)
    monkeypatch.setattr(cpu, "check_function", lambda *args: pytest.fail("checked a function"))
    cpu.install()
    assert cpu._installed is False


@pytest.mark.parametrize(
    ("path", "parameters", "reason"),
    [
        ("sglang.srt.mem_cache.no_such_module.f", (), "no_such_module.f is missing"),
        ("sglang.srt.server_args.ServerArgs.no_such_method", (), "no_such_method is missing"),
        ("canopy_cpu.check_function", ("path", "colour"), r"takes \(path\), not"),
    ],
)
def test_a_moved_function_is_named(path, parameters, reason):
    with pytest.raises(CanopyError, match=reason) as raised:
        cpu.check_function(path, parameters)
    assert SGLANG_VERSION in str(raised.value)


def test_a_disabled_cpu_engine_is_reported_in_one_line(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    monkeypatch.setattr(cpu, "_installed", False)
    with pytest.raises(CanopyError, match=r"\ASGLANG_USE_CPU_ENGINE is '0'.*\Z"):
        cpu.install()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is another device")
@pytest.mark.parametrize("variables", [{}, {"SGLANG_USE_CPU_ENGINE": "0"}])
def test_an_import_of_sglang_enables_the_cpu_engine_unless_it_is_given(variables):
    """SGLang selects the CPU with it: test_environment.py."""
    code = "import os, importlib.util; importlib.util.find_spec('sglang')\n"  # as an import begins
    process = run_python(f"{code}print(os.environ['SGLANG_USE_CPU_ENGINE'])", **variables)
    assert process.stdout.strip() == ("0" if variables else "1"), process.stderr


def test_a_plain_interpreter_imports_neither_torch_nor_sglang():
    code = "import sys; print('torch' in sys.modules, 'sglang' in sys.modules)"
    assert run_python(code).stdout.strip() == "False False"
