"""SGLang's request logs, as its own logger writes them."""

import logging
from pathlib import Path

import pytest
from server_events import event, finished

from canopy_lab.trace import open_trace
from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.sglang_log import read_as_server
from sglang_canopy.errors import CanopyError


def test_requests_come_in_order_of_arrival_and_share_blocks(tmp_path: Path) -> None:
    prompt = list(range(40))
    log = tmp_path / "log"
    log.write_text(
        "\n".join(
            [
                "[2026-01-02 03:04:01] INFO: Uvicorn running",
                event("received", "a", 1.0, obj={}),
                event("received", "b", 2.5, obj={}),
                finished("b", 4.0, [*prompt[:32], 99]),
                finished("a", 5.0, prompt),
                event("received", "c", 6.0, obj={}),
                event("received", "never", 6.5, obj={}),
                finished("c", 7.0, [*prompt, 50, 51]),
            ]
        )
    )
    a, b, c = open_trace(log, "sglang")
    assert [r.time_s for r in (a, b, c)] == [0.0, 1.5, 5.0]
    assert [r.input_tokens for r in (a, b, c)] == [40, 33, 42]
    assert a.blocks[:2] == b.blocks[:2] == c.blocks[:2]
    assert len({a.blocks[2], b.blocks[2], c.blocks[2]}) == 3
    assert (c.conversation, c.turn) == (a.conversation, 2)
    assert (a.output_tokens, a.stop) == (4, "end")


@pytest.mark.parametrize("replicas", [1, 2])
def test_sglangs_own_warm_up_is_no_traffic(tmp_path: Path, replicas: int) -> None:
    """It is text; unless it is skipped, a server's log would have no block ids."""
    text = "The capital city of France is"
    log = tmp_path / "log"
    warm_up = finished("w", 1.0, None, text=text if replicas == 1 else [text] * replicas)
    log.write_text("\n".join([warm_up, finished("a", 5.0, list(range(200)))]))
    (request,) = read_as_server(log)
    assert request.input_tokens == 200
    assert [r.input_tokens for r in open_trace(log, "sglang")] == [200]


def test_the_clients_fields_are_used(tmp_path: Path) -> None:
    said = {
        "canopy_category": "chat",
        "canopy_turn": 3,
        "canopy_conversation": "x",
        "canopy_stop": "tool",
    }
    log = tmp_path / "log"
    log.write_text(finished("a", 5.0, [1, 2, 3], sampling_params={"custom_params": said}))
    (request,) = open_trace(log, "sglang")
    assert (request.category, request.turn, request.conversation, request.stop) == (
        "chat",
        3,
        "x",
        "tool",
    )


def test_text_prompts_share_blocks_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    rows = [
        finished(str(i), 5.0 + i, None, text="hello " * 30 + tail) for i, tail in enumerate("xy")
    ]
    log.write_text("\n".join(rows))
    first, second = open_trace(log, "sglang")
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert first.input_tokens == 46


def test_a_servers_log_may_mix_token_ids_with_text_and_adapters(tmp_path: Path) -> None:
    """Prompts of ``/v1/completions`` and ``/generate`` are logged as their texts."""
    ids, text = list(range(200)), "hello " * 200
    log = tmp_path / "log"
    rows = [
        finished("a", 1.0, ids),
        finished("b", 2.0, None, text=text),
        finished("c", 3.0, None, text=text + "and more"),
        finished("d", 4.0, ids, lora_path="sql", lora_id="0a"),
        finished("e", 5.0, [*ids, 7]),
    ]
    log.write_text("\n".join(rows))
    a, b, c, d, e = read_as_server(log)
    assert a.blocks == e.blocks
    assert b.blocks == c.blocks
    assert b.input_tokens == 300
    assert len(b.blocks) == 300 // 64
    assert len(d.blocks) == 200 // 64
    assert not {*a.blocks} & {*d.blocks}


@pytest.mark.parametrize("field", ["cache_salt", "extra_key", "lora_path"])
@pytest.mark.parametrize("how", ["ids", "text"])
def test_separate_namespaces_share_no_block(tmp_path: Path, field: str, how: str) -> None:
    prompt = {"ids": list(range(40))} if how == "ids" else {"ids": None, "text": "hello " * 60}
    log = tmp_path / "log"
    rows = [
        finished(str(i), 1.0 + i, **prompt, **said) for i, said in enumerate([{}, {field: "x"}])
    ]
    log.write_text("\n".join(rows))
    anyone, tenant = open_trace(log, "sglang")
    assert not {*anyone.blocks} & {*tenant.blocks}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (finished("a", 5.0, [1, 2, "...", 3]), "shortened or nested"),
        (finished("a", 5.0, None), "the prompt was not logged"),
        ("[x] Receive: obj=GenerateReqInput(rid='a')", "in text form"),
    ],
)
def test_errors_of_incomplete_logs_name_the_flags(tmp_path: Path, line: str, why: str) -> None:
    log = tmp_path / "log"
    log.write_text(line + "\n")
    with pytest.raises(CanopyError, match=f"line 1: .*{why}.*--log-requests-level 3"):
        list(open_trace(log, "sglang"))


def test_a_log_without_requests_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("[x] The server is fired up\n")
    with pytest.raises(CanopyError, match="holds no request in JSON"):
        list(open_trace(log, "sglang"))


STARTED = """\
/venv/sglang/launch_server.py:71: UserWarning: 'python -m sglang.launch_server' is deprecated
  Example: sglang serve --model-path <model> [options]
[2026-01-02 03:00:05] Init torch distributed begin.
[2026-01-02 03:00:09] The server is fired up and ready to roll!
"""


@pytest.mark.parametrize("probes", [1, 900])
def test_a_servers_log_is_recognised_after_any_other_lines(tmp_path, probes) -> None:
    """A start logs a hundred lines that begin as a JSON list does, and then come health checks."""
    log = tmp_path / "server.log"
    probe = '[2026-01-02 03:00:10] INFO:     10.0.0.1:1 - "GET /health HTTP/1.1" 200 OK\n'
    log.write_text(STARTED + probe * probes + finished("a", 1, [1] * 40) + "\n")
    assert guess_format(log) == "sglang"


def test_a_servers_log_without_requests_is_recognised_by_its_arguments(tmp_path) -> None:
    log = tmp_path / "server.log"
    log.write_text("[2026-01-02 03:00:01] server_args=ServerArgs(model_path='m')\n" + STARTED)
    assert guess_format(log) == "sglang"


def test_sglangs_own_logger_is_understood(tmp_path: Path) -> None:
    request_logger = pytest.importorskip("sglang.srt.utils.request_logger")
    from sglang.srt.managers.io_struct import GenerateReqInput

    logger = request_logger.RequestLogger(True, 3, "json", [str(tmp_path / "logs")])
    obj = GenerateReqInput(
        input_ids=list(range(3000)),
        sampling_params={"custom_params": {"canopy_turn": 2}},
        rid="r1",
    )
    logger.log_received_request(obj)
    meta = {
        "completion_tokens": 7,
        "e2e_latency": 0.5,
        "finish_reason": {"type": "length", "length": 7},
    }
    logger.log_finished_request(obj, {"text": "x", "meta_info": meta})
    logging.shutdown()
    (log,) = (tmp_path / "logs").iterdir()
    (request,) = open_trace(log, "sglang")
    assert (request.input_tokens, request.output_tokens, request.turn) == (3000, 7, 2)
    assert (request.stop, len(request.blocks)) == ("length", 188)
