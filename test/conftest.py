"""Fixtures of every test: the environment of this machine, real data, a prepared model."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.chip import has_cuda, kernel_environment
from support.ranks import RankRun, two_ranks

ROOT = Path(__file__).resolve().parent.parent

# No deadline: an example's time depends on the machine's load. Examples are equal in each run, so that
# only a change makes a test fail; `--all` draws new examples, and more of them.
settings.register_profile("canopy", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("explore", deadline=None, print_blob=True)

# Set before sglang or triton is imported.
for name, value in kernel_environment(has_cuda()).items():
    os.environ.setdefault(name, value)
# Else the checkouts of a machine build SGLang's page hash again whenever another one has.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".canopy" / "torch_extensions"))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# SGLang imports its 250 other models only for a model that is not among these.
os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "support.models")

# Files of over twenty seconds; at the end of a run one of them would delay a single worker.
LONG_FILES = {"test_ranks", "test_fuzz", "test_scenarios", "test_plan_command", "test_real_traces"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked `long`")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("explore" if config.getoption("--all") else "canopy")
    # pytest-xdist's marker; the laboratory is tested without that plugin too.
    config.addinivalue_line("markers", "xdist_group(name): a group stays with one worker")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own hook reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run servers first, then ranks and long files; the others go to the first idle worker. A file
    stays with one worker. Files marked with the same `xdist_group` do, one after the other."""
    items.sort(key={item: (_start_class(item), *_group_key(item)) for item in items}.__getitem__)
    if not config.getoption("--all"):
        skip = pytest.mark.skip(reason="long: ./scripts/test.sh --all runs it")
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(skip)


def _start_class(item: pytest.Item) -> int:
    """Return 0 for servers, 1 for ranks and the files of `LONG_FILES`, 2 for others."""
    if "served" in item.path.parts:
        return 0
    return 1 if item.path.stem in LONG_FILES or item.get_closest_marker("xdist_group") else 2


def _group_key(item: pytest.Item) -> tuple[bool, str]:
    """Return the item's position among groups. An item without a group gets its file as its group."""
    marker = item.get_closest_marker("xdist_group")
    if marker is None:
        item.add_marker(pytest.mark.xdist_group(item.location[0]))
        return True, ""
    return False, marker.args[0]


@pytest.fixture(autouse=True)
def restore_canopy_variables() -> Iterator[None]:
    """Restore the variables that Canopy's start sets for child processes."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("CANOPY_")}
    yield
    for name in [name for name in os.environ if name.startswith("CANOPY_")]:
        if name not in variables:
            del os.environ[name]
    os.environ.update(variables)


@pytest.fixture(scope="session")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankRun]:
    """The pair of ranks of the group `ranks`."""
    with two_ranks(tmp_path_factory.mktemp("ranks")) as runner:
        yield runner


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real traces: $CANOPY_DATA, else `shared/data` next to the checkout."""
    from support.trace_samples import data_folder

    return data_folder()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The prepared SmolLM2 directory (scripts/test.sh prepares it)."""
    model = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
    if not (model / "config.json").exists():
        pytest.skip("SmolLM2 is absent: run ./scripts/test.sh, or see docs/guide/quickstart.md")
    return model


@pytest.fixture(scope="session")
def tiny_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model without weights, for `--load-format dummy`."""
    from tiny_model import write_tiny_model

    model = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(model, smollm2)
    return model


@pytest.fixture(scope="session")
def small_model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with large weights, so that its output depends on the whole prompt."""
    from support.small_models import LLAMA, write_model

    return write_model(tmp_path_factory.mktemp("models") / "small", smollm2, LLAMA)
