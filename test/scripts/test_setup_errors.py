"""Setup errors of a newcomer: each is one clear line and a nonzero exit status."""

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import environment
from environment import SetupError

ROOT = Path(__file__).resolve().parents[2]


def run_script(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / script), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def error_line(process: subprocess.CompletedProcess[str]) -> str:
    lines = process.stderr.strip().splitlines()
    assert len(lines) == 1, process.stderr
    assert process.stdout == ""
    assert process.returncode == 2
    return lines[0]


def write_python(folder: Path, version: str) -> Path:
    """Write a stand-in for Python that prints its version and then fails."""
    python = folder / "python3.9"
    python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}"\nexit 1\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_another_python_is_refused_by_its_version(script, tmp_path):
    line = error_line(run_script(script, PYTHON=str(write_python(tmp_path, "3.9.18"))))
    assert "is not a Python 3.11: Python 3.9.18" in line


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_a_missing_python_311_is_reported(script, tmp_path):
    for tool in ("bash", "dirname", "head", "env"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    write_python(tmp_path, "3.9.18").rename(tmp_path / "python3")
    line = error_line(run_script(script, PYTHON="", PATH=str(tmp_path)))
    assert "needs Python 3.11 (python3 is: Python 3.9.18)" in line


def test_a_port_in_use_is_reported_before_any_work():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        line = error_line(run_script("quickstart.sh", "--once", "--port", str(port)))
    assert f"port {port} cannot be used" in line
    assert "--port" in line


def test_a_port_out_of_range_is_refused():
    line = error_line(run_script("quickstart.sh", "--port", "70000"))
    assert "choose one from 1 to 65535" in line


def test_too_little_disk_is_reported_with_both_sizes():
    with pytest.raises(SetupError, match=r"1\.5 GB free at .*, 5 GB are needed"):
        environment.check_disk(1_500_000_000, 5)
    environment.check_disk(5_000_000_000, 5)


@pytest.fixture
def stamp_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "STAMP_FOLDER", tmp_path)
    return tmp_path


def test_a_torch_changed_after_installing_stops_with_both_versions(stamp_folder):
    (stamp_folder / "torch-build").write_text("2.13.0+cpu 0123456789abcdef\n")
    with pytest.raises(SetupError, match=r"torch was 2\.13\.0\+cpu .* something replaced"):
        environment.check_torch("cpu")


def test_a_torch_other_than_the_pinned_one_is_refused(stamp_folder, monkeypatch):
    (stamp_folder / "torch-build").write_text(environment.torch_build() + "\n")
    environment.check_torch("cpu")
    monkeypatch.setattr(environment, "_torch_pin", lambda: "torch==2.12.0")
    with pytest.raises(SetupError, match=r"the pinned one is torch==2\.12\.0"):
        environment.check_torch("cpu")


def test_a_finished_step_is_done_again_only_when_its_inputs_change(stamp_folder):
    inputs_of_runs = []
    for inputs in (b"one", b"one", b"two"):
        environment.run_once("packages", inputs, lambda i=inputs: inputs_of_runs.append(i))
    assert inputs_of_runs == [b"one", b"two"]


def test_a_step_that_failed_is_not_stamped(stamp_folder):
    def fail():
        raise SetupError("no network")

    with pytest.raises(SetupError):
        environment.run_once("packages", b"one", fail)
    assert not environment.is_stamped("packages", b"one")


def test_pips_reason_is_in_the_message_and_its_output_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "PIP_LOG", tmp_path / "pip.log")
    with pytest.raises(SetupError, match=r"could not install x: ERROR: .*no-such-folder") as error:
        environment.pip_install(["--no-index", "./no-such-folder"], "x")
    assert "pip.log" in str(error.value)
    assert "no-such-folder" in (tmp_path / "pip.log").read_text()


def test_help_is_printed_without_an_installation():
    process = run_script("quickstart.sh", "--help")
    assert process.returncode == 0
    assert "--once" in process.stdout
    assert run_script("test.sh", "--help").stdout.startswith("Lint, format, types, tests")


@pytest.mark.parametrize("missing_part", ["config.json", "weights", "a tokenizer"])
def test_a_model_without_all_its_files_is_refused_before_any_installation(missing_part, tmp_path):
    files = {
        "config.json": "config.json",
        "weights": "model-00001.safetensors",
        "a tokenizer": "tokenizer.json",
    }
    for part, name in files.items():
        if part != missing_part:
            (tmp_path / name).write_text("{}")
    line = error_line(run_script("quickstart.sh", "--model", str(tmp_path)))
    assert line.startswith(f"canopy: --model {tmp_path}: no {missing_part}")
