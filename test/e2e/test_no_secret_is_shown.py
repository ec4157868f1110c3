"""No route and no line of the log of a real server shows a key."""

import json
import urllib.error
import urllib.request

USER, ADMIN = "user-s3cr3t-41c7", "admin-s3cr3t-90be"
ACTS = ("start_", "stop_", "dump_", "flush_", "expert_distribution", "profile")
"""Parts of routes that change a server; some stop a server without experts."""
KEYS = {"no key": None, "the user's": USER, "the administrator's": ADMIN}


def read(url: str, key: str | None) -> str:
    request = urllib.request.Request(url)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return f"{answer.headers}{answer.read(8 << 20).decode(errors='replace')}"
    except urllib.error.HTTPError as error:
        return f"{error.headers}{error.read().decode(errors='replace')}"


def test_no_route_and_no_line_of_the_log_shows_a_key(server, tiny_model) -> None:
    arguments = ("--radix-eviction", "wa", "--api-key", USER, "--admin-api-key", ADMIN)
    arguments += ("--log-requests", "--enable-metrics")
    with server(tiny_model, *arguments, kv_tokens=2048) as client:
        routes = json.loads("{" + read(f"{client.url}/openapi.json", USER).partition("{")[2])
        paths = [path for path, of in routes["paths"].items() if "get" in of and "{" not in path]
        paths = [path for path in paths if not any(part in path for part in ACTS)]
        assert "/server_info" in paths
        assert "admin_api_key" in read(f"{client.url}/server_info", USER)
        paths += ["/metrics", "/canopy/status", "/canopy/ui", "/canopy/explain?conversation=c"]
        shown = {
            f"{path} with {name} key": secret
            for path in paths
            for name, key in KEYS.items()
            for text in (read(client.url + path, key),)
            for secret in (USER, ADMIN)
            if secret in text
        }
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        request = urllib.request.Request(
            f"{client.url}/v1/chat/completions",
            json.dumps(chat).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {USER}"},
        )
        urllib.request.urlopen(request, timeout=120).read()
        log = client.server.log_text()
    assert shown == {}
    lines = [line for line in log.splitlines() if any(s in line for s in (USER, ADMIN))]
    assert lines == []
