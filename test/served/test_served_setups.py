"""Set-ups of SGLang: an answer with KV of any tier equals the cold answer of the same server.

A prompt under a tenant of its own finds no KV: its *cold* answer is the expected one."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import hybrid_models
from support.prompts import token_ids
from support.served import RANK_CORES_ENVIRONMENT, disk_flags, wait_until
from support.small_models import DEEPSEEK_V2, LLAMA, VOCABULARY_TOKENS, write_adapter, write_model
from support.vision_models import PICTURE, noise_picture, write_vision_model

HEAD_TOKENS, PAGE_TOKENS = 304, 16
ADAPTERS = ("law", "tax", None)
Body = dict[str, Any]


def write_llama(folder: Path, smollm2: Path) -> Path:
    # The last of SGLang's stages lacks the embeddings, and so a head that is tied to them.
    return write_model(folder, smollm2, LLAMA, tie_word_embeddings=False)


def write_mla(folder: Path, smollm2: Path) -> Path:
    return write_model(folder, smollm2, DEEPSEEK_V2)


def hybrid_writer(component: str) -> Callable[[Path, Path], Path]:
    def write_hybrid(folder: Path, smollm2: Path) -> Path:
        hybrid_models.build_model(component, folder, smollm2, vocab_size=VOCABULARY_TOKENS)
        return folder

    return write_hybrid


def shared_heads(head_count: int = 5) -> list[Body]:
    """Return a prompt of each head with a tail, then two of each head with other tails."""
    heads = [token_ids(HEAD_TOKENS, seed) for seed in range(1, head_count + 1)]
    order = [*heads, *(head for head in heads for _ in range(2))]
    return [{"input_ids": ids + token_ids(12, 60 + i)} for i, ids in enumerate(order)]


def heads_under_adapters() -> list[Body]:
    bodies = [{**body, "lora_path": name} for body in shared_heads(3) for name in ADAPTERS]
    return [{key: value for key, value in body.items() if value is not None} for body in bodies]


def growing_prompts() -> list[Body]:
    prompts = hybrid_models.conversation_prompts() + hybrid_models.prompts_by_turn()
    return [{"input_ids": ids} for ids in prompts]


def pictures() -> list[Body]:
    """Return a question about a picture twice, about another picture, and another question about the first."""
    story = "Here is what was seen on the way home, told in the order in which it happened: "
    questions = ((1, "Who is it?"), (1, "Who is it?"), (2, "Who is it?"), (1, "Where?"))
    return [
        {
            "text": f"{story}{PICTURE} {question}",
            "image_data": [noise_picture(seed)],
            "return_logprob": True,
        }
        for seed, question in questions
    ]


def with_priorities_and_schemas() -> list[Body]:
    person = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": person, "required": list(person)}
    sampling = {"json_schema": json.dumps(schema), "max_new_tokens": 40, "ignore_eos": False}
    texts = [f"Describe person {number} as JSON: " for number in (1, 2, 1)]
    schema_bodies = [{"text": text, "sampling": sampling} for text in texts]
    return [{**body, "priority": i % 2} for i, body in enumerate(shared_heads())] + schema_bodies


@dataclass(slots=True, frozen=True)
class SetUp:
    """Flags of a server, its model, and the requests to it."""

    flags: tuple[str, ...] = ()
    write_model: Callable[[Path, Path], Path] = write_llama
    bodies: Callable[[], list[Body]] = shared_heads
    kv_tokens: int = 1024
    """Fewer than the requests' tokens, except for pictures."""
    policy: tuple[str, ...] = ("--radix-eviction", "wa")
    host_ratio: float = 0.0
    """Host memory, in multiples of the device's."""
    page_tokens: int = 1
    has_disk: bool = False
    concurrent_requests: int = 1
    min_hits: int = 4 * HEAD_TOKENS
    """Least number of cached tokens, of all requests together."""
    options: dict[str, Any] = field(default_factory=dict)


STATE_FLAGS = ("--max-mamba-cache-size", "12", "--max-running-requests", "3")
BATCH_FLAGS = (
    *("--chunked-prefill-size", "128", "--enable-mixed-chunk", "--max-running-requests", "4"),
    *("--enable-priority-scheduling", "--disable-priority-preemption"),
    *("--default-priority-value", "0", "--canopy-queue-order", "bounded-shortest"),
)
HYBRID_FIELDS = {"bodies": growing_prompts, "kv_tokens": 700, "min_hits": 1}

SETUPS = {
    "pipeline": SetUp(("--pp-size", "2"), options={"environment": RANK_CORES_ENVIRONMENT}),
    "chunks, mixed batches, pages of 64, priorities, schemas, order, overlap": SetUp(
        BATCH_FLAGS,
        lambda _, smollm2: smollm2,
        with_priorities_and_schemas,
        1280,
        page_tokens=64,
        concurrent_requests=4,
        min_hits=1,
        options={"overlap": True},
    ),
    "windows, host": SetUp((), hybrid_writer("windows"), **HYBRID_FIELDS, host_ratio=6),
    "states, host": SetUp(STATE_FLAGS, hybrid_writer("states"), **HYBRID_FIELDS, host_ratio=6),
    "latent attention, disk, meter, floor": SetUp(
        ("--chunked-prefill-size", "256", "--canopy-whatif", "auto,floor=on"),
        write_mla,
        page_tokens=PAGE_TOKENS,
        host_ratio=3,
        has_disk=True,
        concurrent_requests=3,
        min_hits=4 * HEAD_TOKENS,
    ),
    "adapters, disk": SetUp(
        ("--enable-lora", "--lora-backend", "torch_native"),
        bodies=heads_under_adapters,
        page_tokens=4,
        host_ratio=4,
        has_disk=True,
        min_hits=18 * HEAD_TOKENS,
    ),
    "host as a buffer, disk": SetUp(
        ("--hicache-host-memory-mode", "buffer_only"), page_tokens=16, host_ratio=2, has_disk=True
    ),
    "pictures": SetUp(("--skip-server-warmup",), write_vision_model, pictures, 2048, min_hits=1),
    "observed": SetUp((), page_tokens=16, policy=("--canopy-observe",), kv_tokens=1536, min_hits=1),
}


def send_body(client: Any, body: Body, tenant: str | None = None) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    request = {key: value for key, value in body.items() if key != "sampling"}
    request["sampling_params"] = sampling | body.get("sampling", {})
    return client.post("/generate", request | ({"extra_key": tenant} if tenant else {}))


def check_answer(answer: dict[str, Any], cold: dict[str, Any]) -> None:
    assert answer["output_ids"] == cold["output_ids"]
    logprobs = (info["meta_info"].get("output_token_logprobs", ()) for info in (answer, cold))
    for (logprob, *_), (expected, *_) in zip(*logprobs, strict=True):
        assert logprob == pytest.approx(expected, abs=1e-4)


def tokens_from_tier(answers: list[dict[str, Any]], tier: str) -> int:
    """Return the prompt tokens of ``answers`` that were cached in ``tier``."""
    details = (answer["meta_info"].get("cached_tokens_details") or {} for answer in answers)
    return sum(by_tier.get(tier, 0) for by_tier in details)


def cached_tokens(answer: dict[str, Any]) -> int:
    return answer["meta_info"]["cached_tokens"]


@pytest.mark.long
@pytest.mark.parametrize("name", SETUPS)
def test_answers_from_every_tier_equal_cold_answers(name, launch, smollm2, tmp_path: Path) -> None:
    setup = SETUPS[name]
    model, bodies = setup.write_model(tmp_path / "model", smollm2), setup.bodies()
    flags = [*setup.policy, *setup.flags, "--page-size", str(setup.page_tokens)]
    if setup.bodies is heads_under_adapters:
        folders = [write_adapter(tmp_path / f"a{seed}", model, seed) for seed in range(2)]
        flags += ["--lora-paths", *[f"{name}={folder}" for name, folder in zip(ADAPTERS, folders)]]
    if setup.host_ratio:
        flags += ["--enable-hierarchical-cache", "--hicache-ratio", str(setup.host_ratio)]
    if setup.has_disk:
        flags += disk_flags(tmp_path / "disk")
    with launch(model, *flags, kv_tokens=setup.kv_tokens, **setup.options) as client:
        cold = [send_body(client, body, f"cold {i}") for i, body in enumerate(bodies)]
        assert sum(map(cached_tokens, cold)) == 0, "a tenant matched another's KV"
        assert len({str(answer["output_ids"]) for answer in cold}) > len(bodies) // 3
        with ThreadPoolExecutor(setup.concurrent_requests) as pool:
            answers = list(pool.map(lambda body: send_body(client, body), bodies))
        for answer, cold_answer in zip(answers, cold, strict=True):
            check_answer(answer, cold_answer)
        hit_tokens = [*map(cached_tokens, answers)]
        assert sum(hit_tokens) >= setup.min_hits, hit_tokens
        if setup.host_ratio and "buffer_only" not in setup.flags:
            assert tokens_from_tier(answers, "host") > 0
        if "--canopy-observe" not in flags and setup.bodies is not pictures:
            wait_until(lambda: has_evicted(client))
        if setup.has_disk:
            check_disk_reads(client, bodies, cold, setup.page_tokens)
        FURTHER_CHECKS.get(name, lambda *_: None)(client, answers)
        if name in ("windows, host", "states, host"):
            reference = hybrid_models.load_model(name.partition(",")[0], model)
            prompts = [body["input_ids"] for body in bodies[:9]]
            expected = [hybrid_models.answer_greedily(reference, ids, 8) for ids in prompts]
            answered = [answer["output_ids"] for answer in cold[:9]]
            assert hybrid_models.answers_agree(answered, expected)
        # Before it is ready, SGLang may log failed connections to itself.
        assert "Traceback" not in client.server.log_text().partition("ready to roll")[2]


def has_evicted(client: Any) -> bool:
    tiers = [rank["tiers"] for rank in client.status()["ranks"]]
    return all(sum(by_tier["device"]["evicted_tokens"].values()) > 0 for by_tier in tiers)


def check_disk_reads(client: Any, bodies: list[Body], cold: list[Any], page_tokens: int) -> None:
    """Check that each prompt is read from the disk once the memory is empty, and only by its own adapter."""
    head_pages = len({json.dumps(body) for body in bodies}) * (HEAD_TOKENS // page_tokens)
    wait_until(lambda: client.rank()["disk"]["pages"] >= 2 * head_pages // 3)
    client.flush()
    for body, cold_answer in zip(bodies[::-1], cold[::-1], strict=True):
        check_answer(answer := send_body(client, body), cold_answer)
        assert tokens_from_tier([answer], "storage") >= HEAD_TOKENS - page_tokens
        client.flush()


def check_adapters(client: Any, answers: list[dict[str, Any]]) -> None:
    assert not any(map(cached_tokens, answers[:9])), "an adapter matched another's KV"


def check_pictures(_: Any, answers: list[dict[str, Any]]) -> None:
    first, repeated, other_picture, other_question = map(cached_tokens, answers)
    assert first == 0
    assert repeated > other_question > other_picture > 0, "KV of a picture matches it alone"
    tokens = (answer["meta_info"]["output_token_logprobs"] for answer in answers)
    logprobs = [[logprob for logprob, *_ in tokens_of_answer] for tokens_of_answer in tokens]
    assert logprobs[0] != pytest.approx(logprobs[2], abs=1e-3), "the picture changes nothing"


def check_observation(client: Any, answers: list[dict[str, Any]]) -> None:
    requests = 2 * len(answers)  # cold and warm
    wait_until(lambda: (client.status()["whatif"] or {}).get("sampled_requests", 0) >= requests)
    status = client.status()
    arms = {(arm["policy"], arm["capacity"]): arm for arm in status["whatif"]["arms"]}
    assert (status["ranks"], status["whatif"]["running"]) == ([], "lru")
    assert {policy for policy, _ in arms} == {"lru", "canopy-lru", "wa"}
    assert arms["lru", "device x2"]["hit_ratio"] >= arms["lru", "now"]["hit_ratio"] > 0
    assert status["next_step"].startswith("Nothing to decide yet: too few requests")
    wait_until(lambda: client.get("/metrics").count("canopy:whatif_hit_ratio{") == len(arms))


def check_meter(client: Any, answers: list[dict[str, Any]]) -> None:
    wait_until(lambda: client.status()["whatif"]["sampled_requests"] >= 2 * len(answers))
    status = client.status()
    assert status["policy"] == client.rank()["running"]
    arms = {(arm["policy"], arm["capacity"]) for arm in status["whatif"]["arms"]}
    assert ("wa", "host x2") in arms
    assert status["whatif"]["spent_s"] > 0


FURTHER_CHECKS = {
    "adapters, disk": check_adapters,
    "pictures": check_pictures,
    "observed": check_observation,
    "latent attention, disk, meter, floor": check_meter,
}
