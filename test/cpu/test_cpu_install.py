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
    monkeypatch.setattr(cpu, "check_function", lambda *a: pytest.fail("checked a function"))
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


def test_a_disabled_cpu_engine_is_reported_in_one_line():
    process = run_python(
        "import canopy_cpu as cpu\n"
        "from sglang_canopy.errors import CanopyError\n"
        "try: cpu.install()\n"
        "except CanopyError as error: print(error)\n",
        SGLANG_USE_CPU_ENGINE="0",
    )
    assert process.stdout.startswith("SGLANG_USE_CPU_ENGINE is '0'")
    assert len(process.stdout.strip().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is another device")
def test_an_import_of_sglang_enables_the_cpu_engine_unless_it_is_given():
    code = "import os, importlib.util; importlib.util.find_spec('sglang')\n"  # as an import begins
    show = "print(os.environ['SGLANG_USE_CPU_ENGINE']"
    assert run_python(f"{code}{show})", SGLANG_USE_CPU_ENGINE="0").stdout.strip() == "0"
    selected = run_python(f"{code}from sglang.srt.utils import get_device\n{show}, get_device())")
    assert selected.stdout.splitlines()[-1] == "1 cpu", selected.stderr


def test_a_plain_interpreter_imports_neither_torch_nor_sglang():
    code = "import sys; print('torch' in sys.modules, 'sglang' in sys.modules)"
    assert run_python(code).stdout.strip() == "False False"


def test_torchvision_imports_on_a_cpu_build_of_torch():
    process = run_python("import torchvision; print(torchvision.transforms.Resize(2))")
    assert process.stdout.startswith("Resize("), process.stderr
