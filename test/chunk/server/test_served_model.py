"""SGLang's own layers, run for rows of the engine's, against a plain model of the same weights."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from canopy_chunks.server import model_view  # noqa: E402
from canopy_chunks.server.served_model import RowsBackend  # noqa: E402
from sglang_canopy.errors import CanopyError  # noqa: E402
from support.chunk_models import FAMILIES, build  # noqa: E402

TEST = Path(__file__).parents[2]
WORKER = """
import json, sys, torch
from pathlib import Path
from support.scheduler_worker import InProcess
from support import chunk_models  # finds comparators
from comparators.weights import load
from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import dense_cache
from canopy_chunks.server import model_view

folder = Path(sys.argv[1])
flags = "--canopy-chunks memory_mb=16,prompt_tokens=512".split()
runner = InProcess(folder, flags, kv_tokens=2048).scheduler.tp_worker.model_runner
models = model_view.served_model(runner), load(folder)
ids, found = torch.randint(0, 300, (150,)), {}
caches = [dense_cache(model, 150) for model in models]
hidden = [engine.prefill(m, ids, c) for m, c in zip(models, caches)]
rows, watched = torch.tensor([3, 40, 41, 149]), ([], [])
for model, cache, seen in zip(models, caches, watched):
    engine.probe_rows(model, ids[rows], rows, cache, 2, lambda l, q, at: seen.append((l, q)))
some = [engine.run_rows(m, ids[rows], rows, c)[0] for m, c in zip(models, caches)]
logits = [m.logits(h) for m, h in zip(models, some)]
pairs = {"hidden": [hidden], "rows": [some], "logits": [logits],
         "queries": [[a, b] for (_, a), (_, b) in zip(*watched)],
         "kv": [*zip(caches[0].k, caches[1].k), *zip(caches[0].v, caches[1].v)]}
off = {name: max(float((a - b).abs().max()) for a, b in them) for name, them in pairs.items()}
print("FOUND", json.dumps({"off": off, "layers": [l for l, _ in watched[0]]}))
"""


OTHER = """
import json, sys, torch, transformers
from pathlib import Path
from support.scheduler_worker import InProcess
from canopy_chunks.fuse import rows as engine
from canopy_chunks.fuse.cache import dense_cache
from canopy_chunks.server import model_view

flags = "--canopy-chunks memory_mb=16,prompt_tokens=512".split()
runner = InProcess(Path(sys.argv[1]), flags, kv_tokens=2048).scheduler.tp_worker.model_runner
model = model_view.served_model(runner)
other = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids, rows, cache = torch.randint(0, 300, (150,)), torch.tensor([3, 40, 41, 149]), dense_cache(model, 150)
with torch.no_grad():
    wanted = other(ids[None]).logits[0]
    all_rows = model.logits(engine.prefill(model, ids, cache))
    some = model.logits(engine.run_rows(model, ids[rows], rows, cache)[0])
off = {"all": float((all_rows - wanted).abs().max()), "some": float((some - wanted[rows]).abs().max())}
print("FOUND", json.dumps({"off": off, "largest": float(wanted.abs().max())}))
"""


def found_by(worker: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", worker, str(folder)],
        cwd=TEST,
        env={**os.environ, "PYTHONPATH": f"{TEST}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("FOUND"))
    return json.loads(line.removeprefix("FOUND "))


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sglangs_layers_equal_a_plain_model(family, tmp_path) -> None:
    made = build(family)
    for name, weights in made.named_parameters():
        if ".mlp." in name and name.endswith("bias"):  # SGLang's Llama has none there
            torch.nn.init.zeros_(weights)
    made.save_pretrained(tmp_path)
    found = found_by(WORKER, tmp_path)
    assert found["layers"] == [0, 1, 2], "the forward ends where the probe has seen enough"
    assert max(found["off"].values()) < 1e-4, found["off"]


@pytest.mark.long
def test_a_model_with_unread_weights_runs(tmp_path) -> None:
    """Phi-3 has one matrix for queries, keys and values; only SGLang's layers split it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = transformers.Phi3Config(
        vocab_size=300, hidden_size=128, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        initializer_range=0.15, pad_token_id=0,
    )  # fmt: skip
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    found = found_by(OTHER, tmp_path)
    assert found["largest"] > 1
    assert max(found["off"].values()) < 1e-4, found


def test_a_layer_that_would_lose_rows_is_an_error() -> None:
    class Narrowing:
        kept = torch.tensor([0])

        def __call__(self, layer, q, k, v):
            return q[:1]

    layer = SimpleNamespace(
        tp_q_head_num=2, tp_k_head_num=1, tp_v_head_num=1, head_dim=4, layer_id=0
    )
    with pytest.raises(AssertionError, match="keep all their rows"):
        RowsBackend(Narrowing()).forward(*(torch.zeros(3, n) for n in (8, 4, 4)), layer, None)


def test_a_model_that_no_test_has_seen_is_refused_by_name() -> None:
    class GemmaForCausalLM:
        pass

    runner = SimpleNamespace(
        model=GemmaForCausalLM(), model_config=SimpleNamespace(hf_config=SimpleNamespace())
    )
    with pytest.raises(CanopyError, match="not GemmaForCausalLM"):
        model_view.served_model(runner)
    llama = type("LlamaForCausalLM", (), {})()
    awq = SimpleNamespace(quantization="awq", hf_config=SimpleNamespace())
    with pytest.raises(CanopyError, match=r"quantised \(awq\)"):  # the method in the checkpoint
        model_view.served_model(SimpleNamespace(model=llama, model_config=awq))
    shape = SimpleNamespace(head_dim=8)
    norms = [SimpleNamespace(weight=torch.ones(n)) for n in (8, 16)]
    model_view.check_head_norms(SimpleNamespace(q_norm=norms[0], k_norm=norms[0]), shape)
    with pytest.raises(CanopyError, match="over more than a head"):
        model_view.check_head_norms(SimpleNamespace(q_norm=norms[0], k_norm=norms[1]), shape)
