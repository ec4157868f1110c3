"""SGLang's keys are redacted in what ``/server_info`` shows."""

from sglang_canopy.server.start.secrets import REDACTED, shown

SECRET = "s3cr3t-9f3a"


def test_keys_are_redacted_and_their_absence_stays_visible() -> None:
    result = {
        "api_key": SECRET,
        "admin_api_key": None,
        "ssl_keyfile_password": "pass-41",
        "launch_command": f"launch --api-key={SECRET}",
    }
    assert shown(result) == {
        "api_key": REDACTED,
        "admin_api_key": None,
        "ssl_keyfile_password": REDACTED,
        "launch_command": f"launch --api-key={REDACTED}",
    }
    assert result["api_key"] == SECRET, "the server keeps it"
    assert shown({"other": SECRET}) == {"other": SECRET}
    assert shown([SECRET]) == [SECRET]
