"""Each attribute that is read with a default exists in SGLang, or is Canopy's own.

A default hides a name that SGLang has changed: a request with beams was once read by a name that no
release has, and was served as if it had none.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_canopy

PACKAGES = (
    Path(sglang_canopy.__file__).parent,
    Path(sglang_canopy.__file__).parents[1] / "canopy_documents",
)
FOREIGN_ATTRIBUTES = {
    "transformers' tokenizers and configurations": {
        *("chat_template", "all_special_ids", "get_added_vocab", "sliding_window"),
        *("use_sliding_window", "rope_parameters", "rope_scaling", "partial_rotary_factor"),
        *("rope_theta", "head_dim"),
    },
    "Starlette's requests": {"headers", "scope", "state", "json", "_json", "getlist"},
    "Python": {"__closure__", "sqlite_errorname"},
    "stores of the disk tier": {"count_pages"},
}


def attributes_with_default() -> Iterator[tuple[str, str]]:
    """Yield each file and attribute of a ``getattr`` with a default."""
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id == "getattr"
                    and len(node.args) == 3
                    and isinstance(node.args[1], ast.Constant)
                ):
                    yield f"{package.name}/{path.relative_to(package)}", node.args[1].value


def names_in(folder: Path) -> set[str]:
    """Return every name in the Python files of a folder."""
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in folder.rglob("*.py"))
    return {name for text in texts for name in re.findall(r"[A-Za-z_]\w+", text)}


@pytest.fixture(scope="module")
def sglang_names() -> set[str]:
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SGLang is not installed")
    srt = Path(spec.submodule_search_locations[0]) / "srt"
    return names_in(srt)


def test_every_attribute_with_a_default_exists(sglang_names) -> None:
    assert "beam_group" in sglang_names
    assert "beam_list" not in sglang_names
    foreign_names = set().union(*FOREIGN_ATTRIBUTES.values())
    missing = {
        (path, name)
        for path, name in attributes_with_default()
        if name not in sglang_names | foreign_names and "canopy" not in name
    }
    assert not missing
