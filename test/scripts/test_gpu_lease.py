"""The GPU lease without a GPU: named files exist, a failing part stops no other, prompts are right."""

import json
import re
import sys
from pathlib import Path

import pytest

import gpu_lease
from gpu_lease import Lease, PromptLibrary


@pytest.fixture
def lease(tmp_path: Path) -> Lease:
    folders = {name: tmp_path / name for name in ("work", "out", "bundle", "site")}
    return Lease("kernels", **folders, skipped_parts=("tests",), lease_s=30.0)


def read_summary(lease: Lease) -> str:
    return (lease.out / f"summary-{lease.call}.txt").read_text()


def test_every_file_that_the_lease_runs_exists() -> None:
    text = Path(gpu_lease.__file__).read_text()
    file_names = re.findall(r'"((?:test|benchmark)/[\w/]+\.py)"', text)
    assert len(file_names) == 3
    assert all((gpu_lease.ROOT / name).is_file() for name in file_names)


def test_a_part_that_fails_or_takes_too_long_stops_no_other(lease: Lease) -> None:
    failing = "print('RESULT x {}'); exit(3)"
    assert not lease.run_part("bad", 9, sys.executable, "-c", failing)
    assert not lease.run_part("slow", 3, sys.executable, "-c", "import time; time.sleep(60)")
    assert not lease.run_part("tests", 9, sys.executable, "-c", "")
    printing = "import os; print('RESULT', os.environ['A'])"
    assert lease.run_part("good", 9, sys.executable, "-c", printing, A="b")
    text = read_summary(lease)
    assert "tests: left out" in text
    for line in ("bad: 3", "RESULT x {}", "slow: its time", "good: ok", "RESULT b"):
        assert line in text
    assert (lease.out / "logs-kernels.tgz").stat().st_size > 0


def test_a_server_that_ends_is_reported(lease: Lease) -> None:
    lease.bundle.mkdir()
    (lease.bundle / "serve.sh").write_text("exit 3")
    with lease.server("wa", 20) as is_running:
        assert not is_running
    assert "server wa did NOT start" in read_summary(lease)


def test_the_call_for_kernels_continues_after_every_failure(lease, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    gpu_lease.kernels(lease)
    assert read_summary(lease).count(": 1 after") == 6  # facts, install, three checks, waits


def test_bounds_match_a_prompts_documents() -> None:
    library = PromptLibrary(2000)
    assert len(library.documents) == 6
    ids, fields = library.prompt((3, 0))
    start_a, end_a, start_b, end_b = fields["canopy_document_bounds"]
    assert (ids[start_a:end_a], ids[start_b:end_b]) == (library.documents[3], library.documents[0])
    assert ids[:start_a] == library.system
    assert (end_a, len(ids)) == (start_b, end_b + gpu_lease.QUESTION_TOKENS)


def test_arms_get_the_same_requests() -> None:
    assert gpu_lease.zipf_prompts(5) == gpu_lease.zipf_prompts(5)
    assert PromptLibrary(1000).draw_prompt(2) == PromptLibrary(1000).draw_prompt(2)


def test_a_random_model_has_a_llamas_weights_and_their_spread(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    bundled, out = tmp_path / "bundled", tmp_path / "out"
    bundled.mkdir()
    (bundled / "config.json").write_text(json.dumps(config))
    weight_bytes = gpu_lease.write_model(out, bundled, "cpu")
    tensors = {}
    for file in out.glob("*.safetensors"):
        tensors |= load_file(file)
    expected = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    assert {n: x.shape for n, x in tensors.items()} == {n: x.shape for n, x in expected.items()}
    assert weight_bytes == sum(x.nbytes for x in tensors.values())
    spread = float(tensors["model.layers.0.mlp.down_proj.weight"].float().std()) * 96**0.5
    assert spread == pytest.approx(gpu_lease.OUTPUT_GAIN, rel=0.05)
