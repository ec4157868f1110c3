"""The project's `.venv`, made once and kept current, for the quick start and the tests.

Uses only the standard library until `enter_venv()` has moved into the environment. A step is repeated
only if its inputs changed: its stamp in `.venv/canopy-stamps` is a digest of them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STATE_FOLDER = ROOT / ".canopy"
STAMP_FOLDER = VENV / "canopy-stamps"
REQUIREMENTS = ROOT / "requirements"
PIP_LOG = STATE_FOLDER / "logs" / "pip.log"
BAR_INTERVAL_S = 0.1 if sys.stderr.isatty() else 10.0  # a log file needs few lines of a bar
RETRY_AFTER_S = 5.0
NEEDED_DISK_GB = {"cpu": 5, "cuda": 25}  # the environment, the model, and room to unpack


class SetupError(Exception):
    """A setup step failed. The message is one line with the fault and the cure."""


def say(text: str) -> None:
    print(f"canopy: {text}", file=sys.stderr, flush=True)


def detect_device(requested: str = "auto") -> str:
    """Return `cpu` or `cuda`; `auto` chooses `cuda` if nvidia-smi runs."""
    if requested != "auto":
        return requested
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "cuda" if answer.returncode == 0 and "GPU" in answer.stdout else "cpu"


def enter_venv(device: str) -> None:
    """Continue this program inside `.venv`, which is made first if it is missing."""
    if Path(sys.prefix).resolve() == VENV.resolve():
        return
    python = VENV / "bin" / "python"
    if not is_stamped("created", b""):
        check_disk(shutil.disk_usage(ROOT).free, NEEDED_DISK_GB[device])
        if (VENV / "pyvenv.cfg").exists() and not _is_python_311(python):
            raise SetupError(f"{VENV} is not a Python 3.11 environment; remove it and run again")
        if reason := _run_with_dots("making .venv", [sys.executable, "-m", "venv", str(VENV)]):
            raise SetupError(f"making .venv failed: {reason}; its output is in {PIP_LOG}")
        write_stamp("created", b"")
    # Packages are installed without bytecode, which the first import writes. With
    # PYTHONDONTWRITEBYTECODE every process of a server would compile SGLang at each start.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    os.execve(python, [str(python), *sys.argv], variables)


def install(device: str, *, tests: bool = False) -> None:
    """Install the pinned packages and this project; raise SetupError if torch is not as pinned."""
    if not is_stamped("torch", _inputs_of_torch(device)):
        check_disk(shutil.disk_usage(ROOT).free, NEEDED_DISK_GB[device])
        arguments = ["-r", str(REQUIREMENTS / "cuda.txt")] if device == "cuda" else [_torch_pin()]
        pip_install(arguments, "torch")
        write_stamp("torch", _inputs_of_torch(device))
        (STAMP_FOLDER / "torch-build").write_text(torch_build() + "\n", encoding="utf-8")
    if device == "cpu":
        _install_files("packages", ["cpu.txt", "pins.txt"], ["-r", "cpu.txt"])
        _install_files("sglang", ["cpu-nodeps.txt"], ["--no-deps", "-r", "cpu-nodeps.txt"])
        stand_in = ROOT / "sgl-kernel" / "cpu"
        _install_project("import stand-ins", stand_in, [str(stand_in)])
    if tests:
        _install_files("test tools", ["test.txt", "pins.txt"], ["-r", "test.txt"])
        _add_test_support()
    _install_project("sglang-canopy", ROOT, ["-e", str(ROOT)])
    check_torch(device)
    # This interpreter read its .pth files before the installation.
    site.addsitedir(sysconfig.get_paths()["purelib"])
    importlib.invalidate_caches()


def _add_test_support() -> None:
    """Let benchmarks import the tests' own helpers from test/, and the small models of scripts/."""
    packages = Path(sysconfig.get_paths()["purelib"])
    (packages / "canopy-test-support.pth").write_text(
        f"{ROOT / 'test'}\n{ROOT / 'scripts'}\n", encoding="utf-8"
    )


def check_torch(device: str) -> None:
    """Stop if the installed torch is not the build that this script installed."""
    recorded = (STAMP_FOLDER / "torch-build").read_text(encoding="utf-8").strip()
    installed = torch_build()
    if installed != recorded:
        raise SetupError(
            f"torch was {recorded.split()[0]} when it was installed and is {installed.split()[0]} "
            "now: something replaced the pinned build; remove .venv and run again"
        )
    pinned = _torch_pin() if device == "cpu" else _sglang_torch_pin()
    if pinned.removeprefix("torch==") != installed.split()[0].split("+")[0]:
        raise SetupError(
            f"torch is {installed.split()[0]}, but the pinned one is {pinned}: pip took it from "
            "elsewhere; remove .venv, look at pip's configuration and run again"
        )


def torch_build() -> str:
    """Return the installed torch's version and a digest of its file list."""
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return "missing -"
    return f"{torch.version} {combined_digest([(torch.read_text('RECORD') or '').encode()])[:16]}"


def check_disk(free_bytes: int, needed_gb: int) -> None:
    if free_bytes < needed_gb * 1e9:
        raise SetupError(
            f"{free_bytes / 1e9:.1f} GB free at {ROOT}, {needed_gb} GB are needed; make room"
        )


def pip_install(arguments: Sequence[str], label: str) -> None:
    """Run `pip install`, with one retry: pip reports an index that briefly fails as a package that
    does not exist."""
    command = [sys.executable, "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", *arguments]
    if _run_with_dots(label, command, REQUIREMENTS):
        time.sleep(RETRY_AFTER_S)
        if reason := _run_with_dots(label, command, REQUIREMENTS):
            raise SetupError(f"pip could not install {label}: {reason}; its output is in {PIP_LOG}")


def _run_with_dots(label: str, command: Sequence[str], folder: Path = ROOT) -> str | None:
    """Run a command, and print a dot every second. Return the reason of a failure."""
    log_start = len(PIP_LOG.read_text(encoding="utf-8")) if PIP_LOG.exists() else 0
    sys.stderr.write(f"canopy: {label} ")
    status = run_logged(command, lambda: print(".", end="", file=sys.stderr, flush=True), folder)
    sys.stderr.write("\n")
    if not status:
        return None
    errors = re.findall(r"^ERROR.*", PIP_LOG.read_text(encoding="utf-8")[log_start:], re.MULTILINE)
    return errors[0] if errors else f"it ended with status {status}"


def run_logged(
    command: Sequence[str], on_second: Callable[[], object], folder: Path = ROOT, **variables: str
) -> int:
    """Run a command, its output in PIP_LOG, and call ``on_second`` every second; return its status."""
    PIP_LOG.parent.mkdir(parents=True, exist_ok=True)
    with PIP_LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env={**os.environ, **variables}
        )
        try:
            while True:
                try:
                    return process.wait(timeout=1.0)
                except subprocess.TimeoutExpired:
                    on_second()
        finally:
            process.kill()


def run_once(name: str, inputs: bytes, action: Callable[[], None]) -> None:
    """Do `action` unless it was done with the same `inputs` before."""
    if not is_stamped(name, inputs):
        action()
        write_stamp(name, inputs)


def is_stamped(name: str, inputs: bytes) -> bool:
    path = _stamp_path(name)
    return path.exists() and path.read_text(encoding="utf-8") == combined_digest([inputs])


def write_stamp(name: str, inputs: bytes) -> None:
    path = _stamp_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(combined_digest([inputs]), encoding="utf-8")


def combined_digest(parts: Iterable[bytes]) -> str:
    combined = hashlib.sha256()
    for part in parts:
        combined.update(hashlib.sha256(part).digest())
    return combined.hexdigest()


def _install_files(name: str, files: Sequence[str], arguments: Sequence[str]) -> None:
    inputs = b"\0".join((REQUIREMENTS / file).read_bytes() for file in files)
    run_once(name, inputs, lambda: pip_install(arguments, name))


def _install_project(name: str, folder: Path, target: Sequence[str]) -> None:
    files = [folder / "pyproject.toml", *sorted(folder.glob("*.pth")), *sorted(folder.glob("*.py"))]
    files += sorted((folder / "src").rglob("*.py"))
    inputs = str(folder).encode() + b"".join(file.read_bytes() for file in files)
    options = ["--no-deps", "--no-build-isolation", "--force-reinstall"]
    run_once(name, inputs, lambda: pip_install([*options, *target], name))


def _torch_pin() -> str:
    text = (REQUIREMENTS / "cpu.txt").read_text(encoding="utf-8")
    pin = re.search(r"^torch==\S+", text, re.MULTILINE)
    if pin is None:
        raise SetupError("requirements/cpu.txt pins no torch; restore it with git")
    return pin.group()


def _sglang_torch_pin() -> str:
    for requirement in importlib.metadata.requires("sglang") or ():
        if requirement.startswith("torch=="):
            return requirement.split(";")[0].strip()
    raise SetupError("the installed sglang pins no torch; remove .venv and run again")


def _inputs_of_torch(device: str) -> bytes:
    if device == "cpu":
        return f"cpu {_torch_pin()}".encode()
    return b"cuda " + (REQUIREMENTS / "cuda.txt").read_bytes()


def _stamp_path(name: str) -> Path:
    return STAMP_FOLDER / name.replace(" ", "-")


def _is_python_311(python: Path) -> bool:
    check = "import sys; sys.exit(sys.version_info[:2] != (3, 11))"
    try:
        return subprocess.run([str(python), "-c", check], check=False).returncode == 0
    except OSError:
        return False
