"""A server without documents never imports ``canopy_chunks``, and one file of it names the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_canopy

PACKAGE = Path(sglang_canopy.__file__).parent
START = """
import argparse, sys
from sglang.srt.server_args import ServerArgs
from sglang_canopy.server.documents import hooks as documents
from sglang_canopy.server.start import plugin, seams
parser = argparse.ArgumentParser()
documents._add_flags(None, parser)
server_args = argparse.Namespace(tp_size=1)
documents._keep_options(server_args, None, parser.parse_args(sys.argv[1:]))
scheduler = argparse.Namespace()
for hook in (documents._idle, documents.request_created, documents._internal_state):
    hook(scheduler, scheduler)
documents._add_routes(server_args)
print("canopy_chunks" in sys.modules)
"""


def imported(path: Path) -> set[str]:
    """The packages that a file imports, inside functions too."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in names}


def test_one_file_names_the_package_of_documents() -> None:
    naming = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "canopy_chunks" in imported(path)
    ]
    assert naming == ["server/documents/hooks.py"]


@pytest.mark.parametrize("arguments", [(), ("--canopy-chunks", "off")])
def test_a_server_without_documents_never_imports_their_package(arguments) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START, *arguments], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().endswith("False"), done.stdout + done.stderr
