"""Breaks of prefixes: every seeded kind is found, and none in logs that only grow."""

import json
import random

import pytest

from canopy_lab.advise.breaks import finder
from canopy_lab.advise.breaks.cures import as_json, sentences
from canopy_lab.advise.breaks.differences import difference_kind
from canopy_lab.advise.breaks.finder import Finder
from canopy_lab.advise.breaks.memory import RecentMap
from canopy_lab.advise.breaks.read import NEEDS_TOKENIZER, NO_TEXT, read_breaks
from canopy_lab.cli.main import main
from canopy_lab.trace.openai_log import parse
from canopy_lab.trace.template import split_template
from support import seeded_breaks as seeded


def prose(count: int, words: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [
        " ".join(f"w{rng.randrange(3000):04d}" for _ in range(words)) + "." for _ in range(count)
    ]


@pytest.fixture(scope="module")
def clean_log():
    lines = iter(prose(4000, 12, 3))
    runs = [
        [("\n".join(next(lines) for _ in range(8)), "\n".join(next(lines) for _ in range(5))) for _ in range(6)]
        for _ in range(18)
    ]  # fmt: skip
    return seeded.clean_log(runs, prose(600, 16, 4), 1, 18)


def find_breaks(log, *, with_names=True, **limits):
    finder = Finder(**limits)
    for line_number, entry in enumerate(log):
        for prompt in parse(seeded.without_labels(entry, with_names=with_names), line_number):
            finder.add(prompt)
    return finder.breaks()


@pytest.mark.parametrize("has_names", [True, False])
def test_a_log_that_only_grows_has_no_findings(clean_log, has_names):
    report = find_breaks(clean_log, with_names=has_names)
    assert report.requests == len(clean_log)
    assert report.applications == 3
    assert not report.findings
    assert sentences(report) == [
        f"No difference breaks the prefixes of {report.requests} requests: equal text always follows equal text."
    ]


@pytest.mark.parametrize("name", seeded.BREAKS)
def test_a_seeded_break_is_reported_with_its_place_and_kind(clean_log, name):
    seeded_break = seeded.BREAKS[name]
    part, kinds = seeded_break.part, seeded_break.expected_names
    rate = 1.0 if name == "moving reminder" else 0.5
    report = find_breaks(seeded.with_break(clean_log, name, rate))
    matching = [f for f in report.findings if f.place == part and f.kind in kinds]
    assert matching, [(f.place, f.kind, f.tokens) for f in report.findings]
    assert report.findings[0] in matching


@pytest.mark.parametrize("name", ["time", "tool order", "picture"])
def test_the_tokens_are_those_that_an_endless_cache_misses_more(clean_log, name):
    unbroken = seeded.with_break(clean_log, name, 0.0)
    clean, broken = (find_breaks(unbroken), find_breaks(seeded.with_break(clean_log, name, 1.0)))
    missed_tokens = (broken.tokens - broken.cached_tokens) - (clean.tokens - clean.cached_tokens)
    attributed_tokens = sum(finding.tokens for finding in broken.findings)
    assert missed_tokens > 0
    assert attributed_tokens == pytest.approx(missed_tokens, rel=0.1)


def test_a_value_that_changes_by_user_differs_from_one_by_request(clean_log, monkeypatch):
    monkeypatch.setattr(finder, "MIN_FINDING_SHARE", 0.0)
    users = find_breaks(seeded.with_break(clean_log, "user", 1.0)).findings[0]
    times = find_breaks(seeded.with_break(clean_log, "time", 1.0)).findings[0]
    assert (users.per, times.per) == ("user", "request")


def test_memory_is_bounded_by_prompts_and_by_bytes(clean_log):
    log = seeded.with_break(clean_log, "time", 1.0)
    by_prompts = Finder(max_prompts=20)
    by_bytes = Finder(max_bytes=400_000)
    for line_number, entry in enumerate(log):
        for prompt in parse(seeded.without_labels(entry, with_names=True), line_number):
            by_prompts.add(prompt)
            by_bytes.add(prompt)
            assert len(by_prompts.memory._prompts) <= 20
            assert by_bytes.memory.text_bytes <= 200_000
    assert by_prompts.breaks().findings[0].kind == "time"
    segments = by_prompts.memory._segments.values()
    numbers = [segment.number for segment in segments if segment.prompt_count]
    assert len(numbers) == len(set(numbers)) == len(segments)


def test_a_key_in_use_outlives_unused_ones():
    recent_keys: RecentMap[int, int] = RecentMap(4)
    for key in range(40):
        recent_keys.put(key, key)
        assert recent_keys.get(0) == 0
    assert recent_keys.get(20) is None
    assert len(recent_keys._recent) + len(recent_keys._earlier) <= 8


# ---- sources of prompts ----

CHATML = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        (CHATML, ["system", "user", "assistant"]),
        ("<|start_header_id|>system<|end_header_id|>a<|start_header_id|>user<|end_header_id|>b", ["system", "user"]),
        ("<start_of_turn>user\nhi<start_of_turn>model\n", ["user", "assistant"]),
        ("[INST]hi[/INST]", ["user"]),
        ("<|system|>\nx<|user|>y<|assistant|>", ["system", "user", "assistant"]),
        ("<\uff5cUser\uff5c>y<\uff5cAssistant\uff5c>", ["user", "assistant"]),
        ("no template", ["user"]),
    ],
)  # fmt: skip
def test_a_rendered_prompt_is_split_at_its_roles(text, roles):
    parts = split_template(text)
    assert [part.role for part in parts] == roles
    assert "".join(part.text for part in parts) == text


def test_tools_inside_a_rendered_system_prompt_are_parts():
    text = (
        '<|im_start|>system\nYou may call:\n{"type": "function"}\n{"name": "b"}\nNow.<|im_end|>\n'
    )
    parts = split_template(text)
    assert [part.kind for part in parts] == ["text", "tool", "tool", "text"]
    assert "".join(part.text for part in parts) == text


def server_log(tmp_path, *, has_ids=False):
    """A live server's request log whose system prompt holds a clock."""
    unchanged_lines, lines = "\n".join(prose(20, 12, 5)), []
    for minute in range(40):
        system = f"You help.\nCurrent time: 2026-01-02 03:{minute:02d}:00.\n{unchanged_lines}"
        text = CHATML.format(system=system, user=prose(1, 20, 100 + minute)[0])
        prompt = {"input_ids": list(text.encode()), "text": None} if has_ids else {"text": text}
        out = {"meta_info": {"completion_tokens": 4, "finish_reason": {"type": "stop"}}}
        stamp = f"2026-01-02T03:{minute:02d}:00"
        for kind, fields in (("received", {"obj": {}}), ("finished", {"obj": prompt, "out": out})):
            lines.append(json.dumps({"timestamp": stamp, "event": f"request.{kind}", "rid": str(minute), **fields}))  # fmt: skip
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_live_servers_request_log_is_read(tmp_path):
    (finding,) = read_breaks(server_log(tmp_path), "sglang").findings
    assert (finding.kind, finding.place, finding.per) == ("time", "system", "request")
    assert finding.requests == 39


def test_token_ids_need_a_tokenizer(tmp_path):
    log = server_log(tmp_path, has_ids=True)
    assert read_breaks(log, "sglang").not_read == NEEDS_TOKENIZER
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({chr(i): i for i in range(256)}, unk_token="\x00"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    report = read_breaks(log, "sglang", tokenizer=str(tmp_path / "tokenizer.json"))
    assert [finding.kind for finding in report.findings] == ["time"]


def test_a_trace_of_blocks_holds_no_prompts(tmp_path):
    assert read_breaks(tmp_path / "t.jsonl", "mooncake").not_read == NO_TEXT


def test_a_long_log_is_read_in_part_and_the_report_states_it(tmp_path):
    report = read_breaks(server_log(tmp_path), "sglang", max_prompts=20)
    assert not report.is_whole
    assert "the first 20 requests" in sentences(report)[0]


def run_advise(log, tmp_path, capsys, *options):
    numbers, page = tmp_path / "n.json", tmp_path / "page.html"
    args = ["--capacity-tokens", "20000", "--out", str(page), "--json", str(numbers), "--jobs", "1"]
    assert main(["advise", str(log), *args, *options]) == 0
    return capsys.readouterr().out + page.read_text(), json.loads(numbers.read_text())


def test_advice_names_the_break_and_hides_its_values(tmp_path, capsys):
    log = server_log(tmp_path)
    output, numbers = run_advise(log, tmp_path, capsys)
    assert "time in the system prompt, about " in output
    assert "new in each request: 39 requests" in output
    assert "move it to the last message" in output
    (finding,) = numbers["breaks"]["findings"]
    assert finding["kind"] == "time"
    for shown in (output, json.dumps(numbers["breaks"])):
        assert "03:07" not in shown
        assert "Current time" not in shown
        assert "You help" not in shown
    output, numbers = run_advise(log, tmp_path, capsys, "--show-values")
    assert "03:01:00" in output
    assert "You help" in numbers["breaks"]["findings"][0]["name"]


def test_json_without_values_has_no_text_of_the_log(clean_log):
    report = find_breaks(seeded.with_break(clean_log, "counter", 1.0))
    breaks_json = as_json(report)
    assert breaks_json["findings"]
    assert not {"label", "name", "examples"} & set(breaks_json["findings"][0])
    assert {"label", "name", "examples"} <= set(as_json(report, show_values=True)["findings"][0])


@pytest.mark.parametrize(
    ("value", "changed_value", "kind"),
    [
        ("183,204", "182,473", "number"),
        ("0.412", "0.97", "number"),
        ("12.40", "13.05", "number"),
        ("14:05", "14:06", "time"),
        ("1.14.2+8812", "1.15.0+9001", "text"),
        ("\u00b2", "\u00b3", "text"),
        ("9" * 190, "8" * 190, "number"),
    ],
)
def test_the_kind_of_a_value_is_recognised(value, changed_value, kind):
    assert difference_kind(value, changed_value, "tools") == kind


def test_claude_codes_billing_line_has_the_clients_own_switch_as_its_cure(tmp_path):
    path, rng = tmp_path / "log.jsonl", random.Random(1)
    with path.open("w") as out:
        for i in range(40):
            nonce = f"x-anthropic-billing-header: cc_version=2.1; cch={rng.getrandbits(20):05x};"
            system = [{"type": "text", "text": nonce}, {"type": "text", "text": "Be brief. " * 300}]
            body = {"system": system, "messages": [{"role": "user", "content": f"turn {i}"}]}
            out.write(json.dumps({"time": 1.7e9 + i, "body": body}) + "\n")
    assert "set CLAUDE_CODE_ATTRIBUTION_HEADER=0" in sentences(read_breaks(path, "openai"))[1]
