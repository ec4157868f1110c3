"""``--canopy-client-hints``: the fields of a request that count, and the source of the secret."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.client_hints import (
    GATEWAY_HEADER,
    MAX_SECRET_CHARS,
    PRIORITY_FIELDS,
    SECRET_FILE_VARIABLE,
    SECRET_VARIABLE,
    HintRule,
    read_gateway_secret,
    rule_of,
)
from sglang_canopy.server.http import entry
from sglang_canopy.wire.stamp import STAMP_KEY

SECRET, ADMIN = "0123456789abcdef", "admin"
HINT_PARAMS = {
    "canopy_category": "chat",
    "canopy_conversation": "c",
    "canopy_over": True,
    "canopy_return_in_s": 5,
    "canopy_keep_s": 5,
    "canopy_ttl_s": 5,
}


def applied_fields(rule: HintRule, monkeypatch: pytest.MonkeyPatch, **headers: str) -> set[str]:
    """Return the priority fields in the stamp of a request with these headers."""
    monkeypatch.setattr(entry.http_state, "hint_rule", rule)
    stamped_requests: list[Any] = []
    request = SimpleNamespace(headers={name.replace("_", "-"): v for name, v in headers.items()})
    params = {key: value for key, value in HINT_PARAMS.items() if key != "canopy_conversation"}
    # A session of SGLang has a name and implies that its requests follow one another.
    obj = SimpleNamespace(text="a", sampling_params={"custom_params": params}, session_id="c")
    manager = SimpleNamespace(server_args=None)
    entry.stamp_generation(
        lambda _self, sent, _request: stamped_requests.append(sent), manager, obj, request
    )
    stamp = stamped_requests[0].sampling_params["custom_params"][STAMP_KEY]
    assert (stamp["category"], stamp["conversation"]) == ("chat", "c")
    return PRIORITY_FIELDS & stamp.keys()


@pytest.mark.parametrize(("hints", "expected"), [("on", PRIORITY_FIELDS), ("off", set())])
def test_hints_on_or_off_apply_to_all_senders(hints, expected, monkeypatch) -> None:
    rule = HintRule(hints, ADMIN, SECRET)
    for headers in ({}, {"authorization": f"Bearer {ADMIN}"}):
        assert applied_fields(rule, monkeypatch, **headers) == expected


@pytest.mark.parametrize(
    ("headers", "is_trusted"),
    [
        ({}, False),
        ({"authorization": f"Bearer {ADMIN}"}, True),
        ({"authorization": f"bearer {ADMIN}"}, True),
        ({"authorization": ADMIN}, False),
        ({"authorization": "Bearer "}, False),
        ({GATEWAY_HEADER.lower(): SECRET}, True),
        ({GATEWAY_HEADER.lower(): SECRET[:-1]}, False),
        ({GATEWAY_HEADER.lower(): ""}, False),
        ({GATEWAY_HEADER.lower(): "\xe9"}, False),
    ],
)
def test_trusted_means_the_admin_key_or_the_secret(headers, is_trusted, monkeypatch) -> None:
    rule = HintRule("trusted", ADMIN, SECRET)
    expected = PRIORITY_FIELDS if is_trusted else set()
    assert applied_fields(rule, monkeypatch, **headers) == expected


def test_an_empty_credential_is_never_trusted() -> None:
    assert not HintRule("trusted", ADMIN, None).accepts({GATEWAY_HEADER.lower(): ""})
    assert not HintRule("trusted", None, SECRET).accepts({"authorization": "Bearer "})


def test_a_call_without_a_request_is_trusted_only_in_process() -> None:
    assert not HintRule("trusted", ADMIN, SECRET).accepts(None)
    assert HintRule("on").accepts(None)


def test_trusted_mode_without_credentials_stops_the_start(monkeypatch) -> None:
    for name in (SECRET_VARIABLE, SECRET_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CanopyError, match="trusted needs a credential; give --admin-api-key"):
        rule_of("trusted", None)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    assert rule_of("trusted", None).gateway_secret


def test_the_secret_comes_from_a_variable_or_a_file(tmp_path: Path) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text(SECRET + "\n")
    assert read_gateway_secret({}) is None
    assert read_gateway_secret({SECRET_VARIABLE: SECRET}) == SECRET
    assert read_gateway_secret({SECRET_FILE_VARIABLE: str(secret_file)}) == SECRET


@pytest.mark.parametrize(
    "secret", ["", "short", "x" * (MAX_SECRET_CHARS + 1), "two words, long enough", "\xe9" * 20]
)
def test_a_secret_that_cannot_be_used_is_refused_and_not_shown(tmp_path: Path, secret: str) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text(secret)
    for environment in ({SECRET_VARIABLE: secret}, {SECRET_FILE_VARIABLE: str(secret_file)}):
        with pytest.raises(CanopyError, match="openssl rand") as refusal:
            read_gateway_secret(environment)
        assert not secret or secret not in str(refusal.value)


def test_two_sources_or_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CanopyError, match="both set"):
        read_gateway_secret({SECRET_VARIABLE: SECRET, SECRET_FILE_VARIABLE: "/x"})
    with pytest.raises(CanopyError, match="cannot be read"):
        read_gateway_secret({SECRET_FILE_VARIABLE: str(tmp_path / "none")})
