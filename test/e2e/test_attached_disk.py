"""A real server whose disk tier is attached, detached and attached again while it runs."""

import json
import time
import urllib.error
import urllib.request

import pytest

KEY = "an-admin-key"
PROMPT = [1000 + 7 * i for i in range(320)]
FLAGS = (
    *("--page-size", "16", "--radix-eviction", "wa", "--admin-api-key", KEY),
    *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
)


@pytest.mark.long
def test_a_disk_attached_by_name_serves_prompts_from_before_and_keeps_them(
    server, tiny_model, tmp_path
):
    extra = {"path": str(tmp_path / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 16}
    attach = {
        "hicache_storage_backend": "canopy",
        "hicache_storage_backend_extra_config_json": json.dumps(extra),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    with server(tiny_model, *FLAGS, kv_tokens=4096) as client:

        def admin(method: str, path: str, body: dict | None = None) -> None:
            """Call an administrator's route, again while the last step is not over yet."""
            deadline = time.monotonic() + 60.0
            while True:
                data = None if body is None else json.dumps(body).encode()
                headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
                request = urllib.request.Request(client.url + path, data, headers, method=method)
                try:
                    urllib.request.urlopen(request, timeout=60).close()
                    return
                except urllib.error.HTTPError as error:
                    text = error.read().decode()
                    assert "not idle" in text, text
                    assert time.monotonic() < deadline, text
                    time.sleep(0.1)

        def storage_backend(method: str, body: dict | None = None) -> None:
            admin(method, "/hicache/storage-backend", body)

        def flush() -> None:
            admin("POST", "/flush_cache?timeout=20", {})

        def written(pages: int) -> None:
            deadline = time.monotonic() + 60.0
            while json.loads(client.get("/canopy/status"))["ranks"][0]["disk"]["pages"] < pages:
                assert time.monotonic() < deadline
                time.sleep(0.1)

        def served() -> tuple[list[int], int]:
            answer = client.generate(PROMPT, 4, {"canopy_category": "agent"})
            return answer["output_ids"], answer["meta_info"]["cached_tokens_details"]["storage"]

        right = client.generate(PROMPT, 4)["output_ids"]
        storage_backend("PUT", attach)
        client.generate([*PROMPT, *PROMPT[:32]], 1)
        written(22)
        flush()
        assert served() == (right, 304)
        storage_backend("DELETE")
        flush()
        assert client.generate(PROMPT, 4)["output_ids"] == right
        storage_backend("PUT", attach)
        flush()
        assert served() == (right, 304)
