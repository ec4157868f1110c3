"""The GPU lease, checked without a GPU: its commands exist and accept their arguments."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEASE = ROOT / "scripts" / "gpu_lease"


def run(*words, **more):
    env = {**os.environ, "PYTHON": sys.executable, **more}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=280, cwd=ROOT)


@pytest.mark.long
def test_every_program_flag_and_test_of_the_lease_exists():
    done = run("bash", ROOT / "scripts" / "gpu_lease.sh", DRY="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 faults" in done.stdout


KEEPING = """#!/bin/sh
case "$2" in */commands) cp "$2" "$KEPT" ;; esac
"""


def flag(words, name):
    """Return the last value of a flag on a command line."""
    (*_, at) = (i for i, word in enumerate(words) if word == name)
    return words[at + 1]


def test_the_lease_has_all_promised_checks(lease, tmp_path):
    """`wa` against `lru` and `auto`, a host tier with write-back, documents of 2k to 15k tokens against
    SGLang's prefill, exactness at ratio 1, graphs, pages of 64."""
    import check
    import documents

    (tmp_path / "python").write_text(KEEPING)
    (tmp_path / "python").chmod(0o755)
    kept = {"KEPT": str(tmp_path / "commands"), "PYTHON": str(tmp_path / "python")}
    run("bash", ROOT / "scripts" / "gpu_lease.sh", DRY="1", **kept)
    commands = check.commands(tmp_path / "commands")
    parts = {name: words for kind, name, words in commands if kind == "part"}
    servers = {name: words for kind, name, words in commands if kind == "serve"}
    arms = [servers[f"8b_{arm}"] for arm in ("wa", "lru", "auto")]
    assert [words[1] for words in arms] == ["EVICTION=wa", "EVICTION=lru", "EVICTION=auto"]
    assert len({tuple(words[2:]) for words in arms}) == 1, "nothing else differs"
    assert {flag(words, "--page-size") for words in servers.values()} == {"64"}
    assert {words[2] for words in arms} == {"GRAPHS=full"}
    assert "--enable-hierarchical-cache" in servers["host_auto"]  # `auto` writes back
    assert flag(servers["documents"], "--cuda-graph-backend-prefill") == "breakable"
    assert parts["documents_exact"][-2:] == ["exact", "3000"]
    assert parts["documents_speed"][-2:] == ["speed", "15000"]
    assert [n * documents.TOKENS for n in documents.COUNTS] == [2000, 4000, 8000, 15000]
    compiles = [w for w in parts.values() if "canopy_kernel.compile" in w]
    assert all("--here" in words for words in compiles), "for this chip alone"
    assert {f"churn_8b_{arm}" for arm in ("wa", "lru", "auto")} < parts.keys()


def checked(tmp_path, *commands):
    file = tmp_path / "commands"
    file.write_text("".join("\x1f".join(line) + "\n" for line in commands))
    done = run(sys.executable, LEASE / "check.py", file)
    assert done.returncode == 1, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_a_part_that_would_fail_on_the_machine_is_named(tmp_path):
    said = checked(
        tmp_path,
        ("part", "gone", sys.executable, "scripts/gpu_lease/nobody.py"),
        ("part", "words", "env", "A=1", sys.executable, "scripts/gpu_lease/churn.py", "many"),
        ("part", "tests", sys.executable, "-m", "pytest", "-q", "test/kernels/test_gone.py"),
        ("part", "right", sys.executable, "scripts/gpu_lease/churn.py", "3"),
    )
    assert "does not exist" in said["part gone"]
    assert "invalid int value: 'many'" in said["part words"]
    assert "test_gone.py" in said["part tests"]
    assert said["4 parts and 0 servers"] == "3 faults"


@pytest.mark.long
def test_a_server_that_would_not_start_is_named(tmp_path):
    serve = ("bash", str(ROOT / "scripts" / "gpu_bundle" / "serve.sh"))
    said = checked(
        tmp_path,
        ("serve", "flag", *serve, "--canopy-copy-ahead", "auto"),
        ("serve", "refused", *serve, "--canopy-chunks", "on", "--kv-cache-dtype", "fp8_e5m2"),
        ("serve", "right", *serve, "--canopy-chunks", "on"),
    )
    assert "--canopy-copy-ahead" in said["serve flag"]
    assert "serve refused" in said
    assert said["0 parts and 3 servers"] == "2 faults"


def test_a_part_that_fails_costs_only_itself(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\necho RESULT this was said\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    folders = {"WORK": str(tmp_path / "work"), "OUT": str(tmp_path / "out")}
    more = {"PYTHON": str(tmp_path / "python"), "SITE": str(tmp_path / "site")}
    done = run(
        "bash", ROOT / "scripts" / "gpu_lease.sh", "one", **folders, **more, LEASE_SKIP="tests"
    )
    assert done.stdout.count("FAILED with 3") == 10, done.stdout
    assert "tests: left out" in done.stdout
    assert (tmp_path / "out" / "summary-one.txt").read_text().count("this was said") > 8
    assert (tmp_path / "out" / "logs-one.tgz").stat().st_size > 0


@pytest.fixture
def lease(monkeypatch):
    monkeypatch.syspath_prepend(str(LEASE))


def test_bounds_match_a_prompts_documents(lease):
    import documents

    library = documents.library(2000)
    assert len(library.documents) == 6
    ids, fields = library.prompt((3, 0))
    a, b, c, d = fields["canopy_chunks"]
    assert (ids[a:b], ids[c:d]) == (library.documents[3], library.documents[0])
    assert ids[:a] == library.system
    assert (b, len(ids)) == (c, d + documents.QUESTION_TOKENS)


def test_runs_that_are_compared_ask_the_same(lease):
    import churn
    import same

    assert churn.prompts(5) == churn.prompts(5)
    first, again = (same.prompts(random.Random(7)) for _ in range(2))
    assert first == again
    assert first[0][:900] == first[4][:900] != first[1][:900]


def test_a_random_model_has_a_llamas_weights_and_their_spread(lease, tmp_path):
    pytest.importorskip("torch")
    import random_model
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    total = random_model.write(tmp_path, config, "cpu")
    written = {}
    for file in tmp_path.glob("*.safetensors"):
        written |= load_file(file)
    expected = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    assert {n: x.shape for n, x in written.items()} == {n: x.shape for n, x in expected.items()}
    assert total == sum(x.nbytes for x in written.values())
    spread = float(written["model.layers.0.mlp.down_proj.weight"].float().std()) * 96**0.5
    assert spread == pytest.approx(random_model.SPREAD, rel=0.05)
