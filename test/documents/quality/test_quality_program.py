"""``benchmark/documents/quality.py`` as a user runs it: formats, rows, mistakes; and its metrics by hand."""

import json
from types import SimpleNamespace

import pytest
import torch
from comparators import quality, questions
from comparators.weights import load
from quality import main

from canopy_documents.quality import tasks
from canopy_documents.quality.answers import contains_answer, make_case
from sglang_canopy.errors import CanopyError
from support.document_models import build_model

ROW_FIELDS = "selector encode ratio n kl kl_se top1 retained ttft_s ttft_full_s"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A tiny model and a word tokenizer, saved as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    build_model("llama").save_pretrained(folder)
    words = (
        "<unk> </s> the old river was seen in Oslo by Alice answer question what is secret password"
    )
    vocab = {word: token_id for token_id, word in enumerate(words.split())}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def musique_path(tmp_path):
    path = tmp_path / "q.json"
    text = "the old river was seen in Oslo by Alice " * 3
    item = {"ctxs": [{"title": "", "text": text}] * 3, "question": "what is old", "answers": ["x"]}
    path.write_text(json.dumps([item, item, item]))
    return path


def test_rows_have_the_documented_fields(model_dir, musique_path, tmp_path, capsys):
    out = tmp_path / "rows.json"
    args = ["--model", model_dir, "--data", musique_path, "--limit", 2, "--json", out]
    args += ["--selector", "question,random", "--ratio", "0,0.15,1"]
    args += ["--encode", "alone,prefix,standin,mixed"]
    assert main([str(argument) for argument in args]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 24
    for row in rows:
        assert set(ROW_FIELDS.split()) <= set(row)
        assert row["n"] == 2
        assert row["ttft_s"] > 0
        if row["ratio"] == 1.0:
            assert row["kl"] < 1e-6
            assert row["top1"] == 1.0
    assert any(row["kl"] > 1e-4 for row in rows if row["ratio"] == 0.0)
    question_rows = [row for row in rows if row["selector"] == "question" and row["ratio"] == 0.15]
    assert all("kl_minus_random" in row for row in question_rows)
    row_by_encoding = {row["encode"]: row for row in question_rows}
    assert "kl_minus_encode" not in row_by_encoding["alone"]
    expected = row_by_encoding["standin"]["kl"] - row_by_encoding["alone"]["kl"]
    assert row_by_encoding["standin"]["kl_minus_encode"] == pytest.approx(expected)
    assert " ".join(capsys.readouterr().out.split()).startswith(ROW_FIELDS)


def test_synthetic_tasks_need_no_data(model_dir, tmp_path):
    out = tmp_path / "rows.json"
    args = ["--model", str(model_dir), "--task-count", "1", "--json", str(out)]
    assert main([*args, "--chunks", "3", "--chunk-tokens", "40"]) == 0
    report = json.loads(out.read_text())
    assert [task["task"] for task in report["tasks"]] == list(tasks.SYNTHETIC)
    assert report["rows"][0]["n"] == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--selector", "magic"], "selector 'magic' is not known"),
        (["--ratio", "1.5"], "give numbers from 0 to 1"),
        (["--ratio", "x"], "give numbers from 0 to 1"),
        (["--encode", "behind"], "allowed are prefix, mixed, standin, bos, alone"),
        (["--limit", "0"], "at least 1"),
        (["--answer-tokens", "0"], "--answer-tokens 0: give a whole number of at least 1"),
        (["--data", "/nowhere.json"], "is not a file"),
        (["--tasks", "hard"], "task 'hard' is not known"),
        (["--json", "/nowhere/x.json"], "its folder does not exist"),
    ],
)
def test_a_mistake_is_one_line(model_dir, capsys, flags, message):
    assert main(["--model", str(model_dir), *flags]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_three_formats_are_read_and_other_files_refused(tmp_path):
    hotpot = {"context": [["T", ["One. ", "Two."]]], "question": "q", "answer": "a"}
    (tmp_path / "h.json").write_text(json.dumps([hotpot]))
    assert questions.read_examples(tmp_path / "h.json")[0].documents == ("T\nOne. Two.",)
    lines = [
        {"documents": ["d"], "prompt": "p"},
        {"documents": ["e"], "question": "q", "answers": ["a"]},
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [each.answers for each in questions.read_examples(tmp_path / "x.jsonl")] == [(), ("a",)]
    wiki = [{**hotpot, "answer": ["a", "b"]}, {**lines[1], "answers": [["a", "b"], "c"]}]
    (tmp_path / "wiki.json").write_text(json.dumps(wiki))
    assert [each.answers for each in questions.read_examples(tmp_path / "wiki.json")] == [
        ("a", "b"),
        ("a", "b", "c"),
    ]
    (tmp_path / "bad.jsonl").write_text('{"text": 1}')
    with pytest.raises(CanopyError, match="item 1: expected"):
        questions.read_examples(tmp_path / "bad.jsonl")
    (tmp_path / "worse.jsonl").write_text("{")
    with pytest.raises(CanopyError, match="not JSON"):
        questions.read_examples(tmp_path / "worse.jsonl")


def test_real_files_are_read(data_dir):
    for name in ("musique_100.json", "hotpotqa_100.json"):
        examples = questions.read_examples(data_dir / "rag" / name, 5)
        assert len(examples) == 5
        assert all(len(example.documents) >= 2 and example.answers for example in examples)


def test_a_split_fact_is_in_two_documents_and_examples_are_reproducible():
    for each in tasks.make_examples(["split", "coreference"], 5, tasks.default_filler(), 4):
        with_answer = [d for d in each.documents if each.answers[0] in d]
        with_subject = [d for d in each.documents if each.question.split("of ")[-1].strip("?") in d]
        assert len(with_answer) == len(with_subject) == 1
        assert with_answer != with_subject
    repeated = tasks.make_examples(["single"], 2, tasks.default_filler(), 4)
    assert repeated == tasks.make_examples(["single"], 2, tasks.default_filler(), 4)


def test_an_answer_may_be_longer_than_the_measured_tokens(model_dir, musique_path):
    """Answers of full recompute and of fusion have the full length if no end token is generated."""
    from transformers import AutoTokenizer

    model, tokenizer = load(model_dir), AutoTokenizer.from_pretrained(model_dir)
    case = make_case(tokenizer, questions.read_examples(musique_path, 1)[0], 3, 24)
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids: " ".join(map(str, ids)))
    short_reference = quality.reference_of(model, tokenizer, case)
    reference = quality.reference_of(model, tokenizer, case, answer_tokens=40)
    assert torch.allclose(reference.logprobs, short_reference.logprobs, atol=1e-5)
    assert reference.tokens == short_reference.tokens
    assert len(reference.text.split()) == 40
    assert reference.text.startswith(short_reference.text)
    chunks = quality.encode_case(model, case, "alone")
    arguments = (model, tokenizer, case, reference, chunks, "random")
    exact = quality.measure(*arguments, 1.0, True, answer_tokens=40)
    assert exact["text"] == reference.text
    fused = quality.measure(*arguments, 0.2, True, answer_tokens=40)
    assert len(fused["text"].split()) == 40


@pytest.mark.parametrize(
    ("text", "answers", "f1", "rouge_l"),
    [
        # words shared 2; 2 * 2 / (3 + 4), and in order cat .. mat: the same
        ("cat mat dog", ["cat on mat today"], 4 / 7, 4 / 7),
        # all four shared, the longest common subsequence is 3 (b c d)
        ("b c d e", ["e b c d"], 1.0, 3 / 4),
        # a repeated word counts by its occurrences in both: 2 of 3 and 2 of 2
        ("red red red", ["red red"], 4 / 5, 4 / 5),
        # the best of several answers; articles, case and punctuation do not count
        ("The Exeter College, of Oxford", ["Oxford", "an exeter college"], 2 / 3, 2 / 3),
        ("yes", ["no"], 0.0, 0.0),
        ("", ["no"], 0.0, 0.0),
    ],
)
def test_f1_and_rouge_l_by_hand(text, answers, f1, rouge_l):
    assert quality.f1(text, answers) == pytest.approx(f1)
    assert quality.rouge_l(text, answers) == pytest.approx(rouge_l)


def test_contained_answers_and_mean_errors_by_hand():
    assert contains_answer("It is the Red Tiger, yes.", ["red tiger"])
    assert not contains_answer("reds tigers", ["red"])
    assert quality.mean_and_error([1.0, 3.0]) == (2.0, 1.0)
    assert quality.mean_and_error([5.0]) == (5.0, 0.0)
