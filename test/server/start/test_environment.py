"""The plugin's environment: variables, secrets, and a stale entry point."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import sglang_canopy
from sglang_canopy.server.start.secrets import REDACTED, redact_keys
from support import forked

PACKAGE = Path(sglang_canopy.__file__).parent
VARIABLE_NAMES = sorted({
    name
    for file in PACKAGE.rglob("*.py")
    for name in re.findall(r'"(CANOPY_[A-Z_]+)"', file.read_text(encoding="utf-8"))
})  # fmt: skip


def test_the_plugin_is_imported_before_sglang_in_any_environment() -> None:
    assert "CANOPY_GATEWAY_SECRET" in VARIABLE_NAMES
    environment = {**os.environ, **dict.fromkeys(VARIABLE_NAMES, "no such value")}
    environment.pop("SGLANG_USE_CPU_ENGINE", None)
    code = "import sglang_canopy.server.start.plugin, sglang.srt.server_args, sglang.srt.utils as u"
    command = [sys.executable, "-c", f"{code}; print(u.get_device())"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr[-2000:]
    assert "Failed to load plugin" not in process.stdout + process.stderr
    assert process.stdout.splitlines()[-1] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_wrong_secret_is_refused_when_the_arguments_are_parsed() -> None:
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "prepare_server_args(['--model-path', 'm', '--device', 'cpu', '--radix-eviction', 'wa'])\n"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "CANOPY_GATEWAY_SECRET": "too short"}
    process = forked.run(command, env=environment, timeout=240)
    assert process.returncode != 0
    assert "CANOPY_GATEWAY_SECRET" in process.stderr.splitlines()[-1]


API_KEY = "s3cr3t-9f3a"


def test_keys_are_redacted_and_their_absence_stays_visible() -> None:
    server_info = {
        "api_key": API_KEY,
        "admin_api_key": None,
        "ssl_keyfile_password": "pass-41",
        "launch_command": f"launch --api-key={API_KEY}",
    }
    assert redact_keys(server_info) == {
        "api_key": REDACTED,
        "admin_api_key": None,
        "ssl_keyfile_password": REDACTED,
        "launch_command": f"launch --api-key={REDACTED}",
    }
    assert server_info["api_key"] == API_KEY, "the server keeps it"
    assert redact_keys({"other": API_KEY}) == {"other": API_KEY}
    assert redact_keys([API_KEY]) == [API_KEY]


LOAD_CODE = """
import sys
sys.path.insert(0, sys.argv[1])
from sglang.srt.plugins import load_plugins
load_plugins()
print("served")
"""
METADATA = "Metadata-Version: 2.1\nName: sglang-canopy\nVersion: 0.0.1\n"


def test_a_stale_entry_point_stops_the_process_with_the_remedy(tmp_path: Path) -> None:
    module = "sglang_canopy.server.plugin"
    dist_info = tmp_path / "sglang_canopy-0.0.1.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text(METADATA)
    (dist_info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ncanopy = {module}:load\n")
    process = forked.run([sys.executable, "-c", LOAD_CODE, str(tmp_path)], timeout=280)
    assert "served" not in process.stdout
    assert process.returncode != 0
    assert f"names {module}, which this version does not have" in process.stderr
    assert "pip install" in process.stderr
