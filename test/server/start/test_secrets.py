"""Keys and passwords are redacted wherever SGLang shows its arguments."""

import json
import sys

import pytest

from sglang_canopy.server.start import secrets
from sglang_canopy.server.start.secrets import REDACTED, redacted, redacted_arguments
from support import forked

SECRET = "s3cr3t-9f3a"
SHOW = """
import sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.common import build_server_info
if __name__ == "__main__":
    server_args = prepare_server_args(sys.argv[1:])
    print("repr", server_args)
    print("info", build_server_info(server_args, {}))
    print("kept", server_args.api_key, server_args.admin_api_key)
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-key", SECRET],
        ["--admin-api-key=" + SECRET],
        ["--admin-api", SECRET],
        ["--ssl-keyfile-password", SECRET],
        ["--ssl-keyfile-p=" + SECRET],
        ["--hicache-storage-backend-extra-config", json.dumps({"s3": {"secret_key": SECRET}})],
        ["--hicache-storage-backend-extra-config=" + json.dumps({"access_token": SECRET})],
    ],
)
def test_a_command_line_is_shown_without_secrets(argv: list[str]) -> None:
    shown = redacted_arguments(["python", "-m", "sglang.launch_server", *argv, "--port", "1"])
    assert SECRET not in " ".join(shown)
    assert REDACTED in " ".join(shown)
    assert shown[-2:] == ["--port", "1"]


def test_arguments_without_secrets_are_shown_as_they_are() -> None:
    argv = ["--model-path", "m", "--ssl-keyfile", "key.pem", "--bucket-time-to-first-token", "1"]
    assert redacted_arguments(argv) == argv
    plain = {"max_total_tokens": 7, "extra_key": "k", "ssl_keyfile": "k.pem", "x": {"y": [1, "z"]}}
    assert redacted(plain) == plain


@pytest.mark.parametrize(
    "value",
    [
        {"admin_api_key": SECRET},
        {"outer": {"credentials": {"user": "u", "id": SECRET}}},
        {"extra": json.dumps({"password": SECRET})},
        {"extra": json.dumps({"auth": {"credentials": ["user", SECRET]}})},
        {"extra": "{'secret_key': '" + SECRET + "', rest"},
        [{"hf_token": SECRET}],
    ],
)
def test_nested_values_are_redacted_by_name(value: object) -> None:
    assert SECRET not in repr(redacted(value))
    assert redacted({"api_key": None}) == {"api_key": None}, "that there is no key stays visible"


def test_a_second_reading_searches_nothing_again(monkeypatch) -> None:
    """``/server_info`` reads 500 arguments on the scheduler's thread."""
    shown = {
        "seen_api_key": SECRET,
        "seen_extra": json.dumps({"secret": SECRET}),
        "seen_model": "m",
    }
    first = redacted(shown)
    monkeypatch.setattr(secrets, "_NAME", None)
    monkeypatch.setattr(secrets, "_IN_TEXT", None)
    assert redacted(shown) == first


def test_sglang_shows_no_key_and_still_has_it(tmp_path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    command = [sys.executable, str(script), "--model-path", "dummy", "--device", "cpu"]
    command += ["--api-key", "user-" + SECRET, "--admin-api-key", "admin-" + SECRET]
    done = forked.run(command, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    assert lines["kept"] == f"user-{SECRET} admin-{SECRET}"
    for kind in ("repr", "info"):
        assert "radix_eviction_policy" in lines[kind]
        assert SECRET not in lines[kind]
    assert SECRET not in done.stderr
