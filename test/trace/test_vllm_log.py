"""vLLM's own log, with the lines of several of its versions."""

from pathlib import Path

import pytest

from canopy_lab.trace.guess import guess_format
from canopy_lab.trace.open import open_trace
from sglang_canopy.errors import CanopyError

TEXT = "It's a \"prefix\", isn't it?\n" * 20


def old(when: str, name: str, text: str) -> str:
    return (
        f"INFO {when} [logger.py:41] Received request {name}: prompt: {text!r}, params: "
        "SamplingParams(n=1, stop=[]), prompt_token_ids: None, prompt_embeds shape: None, "
        "lora_request: None."
    )


def test_prompts_and_answers_are_joined(tmp_path: Path) -> None:
    ids = list(range(40))
    lines = [
        "INFO 09-10 19:10:43 [__init__.py:241] Automatically detected platform cuda.",
        old("09-10 19:10:44", "cmpl-1", TEXT),
        f"(APIServer pid=7) DEBUG 09-10 19:10:46 [logger.py:60] Request cmpl-2 details: prompt: None, prompt_token_ids: {ids}, prompt_embeds shape: None.",
        "INFO 09-10 19:10:47 [logger.py:71] Generated response cmpl-2: output: 'a, b', output_token_ids: [1, 2, 3], finish_reason: length",
        "INFO 09-10 19:10:49 [logger.py:71] Generated response cmpl-1 (streaming complete): output: 'x', output_token_ids: None, finish_reason: stop",
        old("09-10 19:10:50", "cmpl-3", TEXT + "And then?"),
    ]  # fmt: skip
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines))
    assert guess_format(path) == "vllm"
    one, two, three = open_trace(path, "vllm")
    assert [r.time_s for r in (one, two, three)] == [0, 2, 6]
    assert one.input_tokens == -(-len(TEXT.encode()) // 4)
    assert (two.input_tokens, two.output_tokens, two.stop) == (40, 3, "length")
    assert one.stop == "end"
    assert one.blocks[:-1] == three.blocks[: len(one.blocks) - 1]
    assert three.conversation == one.conversation
    assert (three.turn, three.output_tokens) == (2, 0)


def test_the_year_turns(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("\n".join([old("12-31 23:59:50", "a", TEXT), old("01-01 00:00:10", "b", TEXT)]))
    assert [r.time_s for r in open_trace(path, "vllm")] == [0, 20]


def test_the_error_of_a_log_without_prompts_names_the_flag(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(
        "INFO 09-10 19:10:44 [logger.py:41] Received request cmpl-1: params: SamplingParams(n=1), lora_request: None."
    )
    with pytest.raises(CanopyError, match="VLLM_LOGGING_LEVEL=DEBUG"):
        list(open_trace(path, "vllm"))


def test_prompts_of_an_adapter_share_no_block_with_the_models_own(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    adapted = old("09-10 19:10:45", "b", TEXT).replace(
        "lora_request: None", "lora_request: LoRARequest(lora_name='sql', lora_int_id=1)"
    )
    path.write_text("\n".join([old("09-10 19:10:44", "a", TEXT), adapted]))
    plain, other = open_trace(path, "vllm")
    assert not {*plain.blocks} & {*other.blocks}


@pytest.mark.parametrize(
    "given", [("'It", "'\0It"), ("prompt_token_ids: None", "prompt_token_ids: [1, 2 3]")]
)
def test_a_line_that_was_damaged_is_a_broken_line(tmp_path: Path, given: tuple[str, str]) -> None:
    path = tmp_path / "server.log"
    path.write_text(old("09-10 19:10:44", "a", "It is").replace(*given))
    with pytest.raises(CanopyError, match="line 1: "):
        list(open_trace(path, "vllm"))
