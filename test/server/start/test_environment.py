"""A wrong environment variable is refused with the arguments, and never keeps the plugin from loading."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_canopy
from support import forked

PACKAGE = Path(sglang_canopy.__file__).parent
VARIABLES = sorted({
    name
    for file in PACKAGE.rglob("*.py")
    for name in re.findall(r'"(CANOPY_[A-Z_]+)"', file.read_text(encoding="utf-8"))
})  # fmt: skip
SHORT = {"CANOPY_GATEWAY_SECRET": "too short"}


def run(code: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_plugin_is_imported_in_any_environment() -> None:
    assert "CANOPY_GATEWAY_SECRET" in VARIABLES
    wrong = dict.fromkeys(VARIABLES, "no such value")
    done = run("import sglang_canopy.server.start.plugin", wrong)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(
            {"CANOPY_GATEWAY_SECRET_FILE": "/no/such/file"}, id="missing", marks=pytest.mark.long
        ),
    ],
)
def test_a_wrong_secret_is_refused_with_the_arguments(variables) -> None:
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "prepare_server_args(['--model-path', 'm', '--device', 'cpu', '--radix-eviction', 'wa'])\n"
    )
    command = [sys.executable, "-c", code]
    done = forked.run(command, env={**os.environ, **variables}, timeout=240)
    assert done.returncode != 0
    assert next(iter(variables)) in done.stderr.splitlines()[-1]
