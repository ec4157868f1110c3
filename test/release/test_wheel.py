"""The wheel and the source distribution, built, and installed into empty environments."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from sglang_canopy import SGLANG_VERSION, __version__

ROOT = Path(__file__).resolve().parents[2]
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
OTHER_PYTHONS = WORKFLOW["jobs"]["laboratory"]["strategy"]["matrix"]["python"]
LABORATORY_TESTS = (
    "advise", "characterize", "cli", "latency", "plan", "policy", "report",
    "reuse", "sim", "trace", "ttl", "whatif",
)  # fmt: skip
"""Folders of tests that need neither torch nor SGLang; the few that do skip themselves."""
TRACE = ROOT / "benchmark" / "quickstart" / "mixed_synthetic.jsonl"
PACKAGES = ("python/sglang_canopy", "python/canopy_lab", "python/canopy_documents", "sgl-kernel/python/canopy_kernel")  # fmt: skip
ROOT_FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")  # fmt: skip
MAX_DISTRIBUTION_BYTES = 2_000_000
"""Largest size of the wheel and of the source distribution."""
BUILD = "from setuptools import build_meta as b; b.build_sdist('../dist'); b.build_wheel('../dist')"


def git_files(*paths: str) -> list[str]:
    """Return the files below ``paths`` that git has, or will have."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *paths]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted({name for name in process.stdout.split() if (ROOT / name).is_file()})


class Distributions(NamedTuple):
    wheel: Path
    source: Path
    """The source distribution."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Build a clean copy: setuptools writes into its working directory."""
    tree = tmp_path_factory.mktemp("build") / "tree"
    for name in git_files(*PACKAGES, *ROOT_FILES):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree.parent / "dist").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=tree, check=True, capture_output=True)
    (wheel,), (source,) = (list((tree.parent / "dist").glob(end)) for end in ("*.whl", "*.tar.gz"))
    return Distributions(wheel, source)


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(built: Distributions) -> None:
    wheel = built.wheel
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = {name for name in names if ".dist-info/" not in name}
    assert files == {name.partition("python/")[2] for name in git_files(*PACKAGES)}
    assert wheel.stat().st_size < MAX_DISTRIBUTION_BYTES
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert wheel.name == f"sglang_canopy-{__version__}-py3-none-any.whl"


def test_the_source_distribution_holds_the_packages_and_nothing_else(built):
    with tarfile.open(built.source) as archive:
        files = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    generated = {name for name in files if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert files - generated == {*ROOT_FILES, *git_files(*PACKAGES)}
    assert built.source.stat().st_size < MAX_DISTRIBUTION_BYTES
    assert built.source.name == f"sglang_canopy-{__version__}.tar.gz"


def test_the_wheels_dependencies_include_neither_torch_nor_sglang(built: Distributions) -> None:
    headers = metadata(built.wheel)
    required = [r for r in headers.get_all("Requires-Dist") if "extra ==" not in r]
    assert not [r for r in required if r.startswith(("torch", "sglang", "transformers"))]
    assert set(headers.get_all("Provides-Extra")) >= {"cuda", "cpu", "test"}


def test_a_wheel_made_from_the_source_distribution_is_the_same(built, tmp_path):
    shutil.unpack_archive(built.source, tmp_path)  # Python 3.11.2 has no filter of tarfile
    (tree,) = tmp_path.iterdir()
    code = "from setuptools import build_meta; print(build_meta.build_wheel('..'))"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (rebuilt,) = tmp_path.glob("*.whl")
    contents = []
    for path in (built.wheel, rebuilt):
        with zipfile.ZipFile(path) as archive:
            contents.append({name: archive.read(name) for name in archive.namelist() if ".dist-info" not in name})  # fmt: skip
    assert contents[0] == contents[1]


def test_the_command_runs_from_the_wheel_alone(built: Distributions, tmp_path: Path) -> None:
    """Not from this checkout, and without torch or sglang, which are hidden."""
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path / "lib")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None; "
        f"sys.path.insert(0, {str(tmp_path / 'lib')!r}); "
        "import sglang_canopy; print(sglang_canopy.__file__); "
        "from canopy_lab.cli.main import main; "
        f"sys.exit(main(['advise', {str(TRACE)!r}, '--capacity-tokens', '9000', '--jobs', '1']))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": ""}, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert str(tmp_path / "lib") in process.stdout
    assert (tmp_path / "advice.html").exists()


def pip(python: Path | str, *arguments: str) -> str:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    return process.stdout


def make_environment(folder: Path, version: str) -> Path:
    """Return the Python of an environment in ``folder`` that has only pip. Skip if there is no such
    Python on PATH or in pyenv, whose shims exist without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))]
    for python in [sys.executable, *filter(shutil.which, candidates)]:
        process = subprocess.run([python, "--version"], capture_output=True, text=True, check=False)
        if process.stdout.startswith(f"Python {version}."):
            subprocess.run([python, "-m", "venv", str(folder)], check=True)
            return folder / "bin" / "python"
    pytest.skip(f"no Python {version} here, neither on PATH nor from pyenv")


@pytest.fixture
def clean_py(tmp_path: Path) -> Path:
    return make_environment(tmp_path / "venv", THIS_PYTHON)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_cuda_extra_resolves_to_the_pinned_sglang(built, clean_py) -> None:
    flags = ("--dry-run", "--quiet", "--report", "-")
    report = pip(clean_py, "install", *flags, f"{built.wheel}[cuda]")
    versions = {package["metadata"]["name"]: package["metadata"]["version"] for package in json.loads(report)["install"]}  # fmt: skip
    assert versions["sglang"] == SGLANG_VERSION
    assert {"torch", "sglang-canopy"} <= versions.keys()


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_cpu_server_starts_in_an_empty_environment(built, clean_py, tmp_path, tiny_model) -> None:
    """Take the manual steps of docs/guide/quickstart.md, with the wheel in place of the checkout."""
    pinned_packages = ROOT / "requirements"
    pip(clean_py, "install", "--quiet", "-r", str(pinned_packages / "cpu.txt"))
    pip(clean_py, "install", "--quiet", "--no-deps", "-r", str(pinned_packages / "cpu-nodeps.txt"))
    stand_in = tmp_path / "stand-in"  # setuptools writes build/ into its working directory
    shutil.copytree(ROOT / "sgl-kernel" / "cpu", stand_in)
    pip(clean_py, "install", "--quiet", "--no-deps", "--no-build-isolation", str(stand_in), str(built.wheel))  # fmt: skip
    code = (
        "import sys; from pathlib import Path; "
        "from launch_server import cpu_arguments, free_port, serving; "
        "import sglang_canopy, json, urllib.request; "
        "flags = [*cpu_arguments(Path(sys.argv[1]), kv_tokens=2048, dtype='float32'), "
        "'--load-format', 'dummy', '--radix-eviction', 'wa']\n"
        "with serving(flags, log=Path('log'), port=free_port(), deadline_s=900, patience_s=0) as server:\n"
        "    status = json.load(urllib.request.urlopen(server.url + '/canopy/status', timeout=120))\n"
        "    print(sglang_canopy.__file__, status['version'], status['policy'])"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    env["PATH"] = f"{clean_py.parent}:{env['PATH']}"
    del env["SGLANG_EXTERNAL_MODEL_PACKAGE"]  # a package of the tests (conftest.py)
    process = subprocess.run([clean_py, "-c", code, tiny_model], cwd=tmp_path, capture_output=True, text=True, env=env, check=False)  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    package_file, version, policy = process.stdout.split()[-3:]
    assert Path(package_file).is_relative_to(clean_py.parents[1])
    assert (version, policy) == (__version__, "wa")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("distribution", Distributions._fields)
def test_the_laboratory_runs_in_an_empty_environment(built, clean_py, tmp_path, distribution):
    pip(clean_py, "install", "--quiet", str(getattr(built, distribution)))
    installed = pip(clean_py, "list", "--format", "freeze").lower()
    assert not [line for line in installed.splitlines() if line.startswith(("torch", "sglang=="))]
    for module in ("sglang_canopy.policy.registry", "canopy_lab.cli.main", "canopy_documents.calibration.saved"):  # fmt: skip
        subprocess.run([clean_py, "-c", f"import {module}"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, check=True)  # fmt: skip
    canopy = clean_py.parent / "canopy"
    for arguments in (
        ["--version"],
        ["advise", str(TRACE), "--capacity-tokens", "20000"],
        ["characterize", str(TRACE), "--format", "bailian", "--out", "report"],
        ["simulate", str(TRACE), "--format", "bailian", "--policy", "lru,wa", "--capacity", "0.1"],
    ):  # fmt: skip
        env = {**os.environ, "PYTHONPATH": ""}
        process = subprocess.run([canopy, *arguments], cwd=tmp_path, capture_output=True, text=True, env=env, check=False)  # fmt: skip
        assert process.returncode == 0, f"{arguments}: {process.stderr[-1000:]}"


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("version", OTHER_PYTHONS)
def test_the_laboratorys_tests_pass_under_another_python(built, tmp_path, version):
    python = make_environment(tmp_path / "venv", version)
    tools = ("pytest", "hypothesis", "pytest-timeout", "tokenizers", "xxhash")
    pip(python, "install", "--quiet", str(built.wheel), *tools)
    env = {**os.environ, "PYTHONPATH": ""}
    code = "import canopy_lab, sglang_canopy; print(canopy_lab.__file__, sglang_canopy.__file__)"
    run = subprocess.run([python, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert all(Path(file).is_relative_to(tmp_path) for file in run.stdout.split())
    tests = [str(ROOT / "test" / folder) for folder in LABORATORY_TESTS]
    process = subprocess.run(
        [python, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/tests", *tests],
        cwd=ROOT, capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-3000:]
    passed = re.search(r"(\d+) passed", process.stdout)
    assert passed is not None
    assert int(passed[1]) > 500, process.stdout[-300:]
