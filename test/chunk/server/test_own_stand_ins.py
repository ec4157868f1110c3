"""A server's engine with stand-ins from the tenant's own documents: what is encoded behind what, whose
text it is, what is left of it after a deletion or a restart, and what a trial measures."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_engine import LENGTH, SYSTEM, Tokenizer, held, learn, request, tiers  # noqa: E402
from test_working_memory import Peak  # noqa: E402

from canopy_chunks import stand_ins as rule  # noqa: E402
from canopy_chunks.cache import dense_cache  # noqa: E402
from canopy_chunks.chunk import OWN, FusedPrompt, Placed  # noqa: E402
from canopy_chunks.documents import document_name  # noqa: E402
from canopy_chunks.encode import encode  # noqa: E402
from canopy_chunks.engine import logits, prefill  # noqa: E402
from canopy_chunks.fusion import fused_prefill  # noqa: E402
from canopy_chunks.selectors import make_selector  # noqa: E402
from canopy_chunks.server import engine as engines  # noqa: E402
from canopy_chunks.server import request as requests  # noqa: E402
from canopy_chunks.server.engine import ChunkEngine  # noqa: E402
from canopy_chunks.server.options import Options  # noqa: E402
from canopy_chunks.server.scheduler import run_commands  # noqa: E402
from canopy_chunks.stand_in_trial import ANSWER_TOKENS  # noqa: E402
from canopy_chunks.working_memory import working_memory  # noqa: E402
from sglang_canopy.errors import CanopyError  # noqa: E402

GAP = tuple(Tokenizer().encode("\n\n"))


def document(number: int) -> list[int]:
    draw = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, 300, (LENGTH,), generator=draw).tolist()


def prompt(order, question: int = 0) -> tuple[list[int], list[int]]:
    out, bounds = list(range(20, 20 + SYSTEM)), []
    for number in order:
        bounds += [len(out), len(out) + LENGTH]
        out += document(number)
    return [*out, 250 + question, 5, 6, 7, 8], bounds


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A choice and a trial of few prompts."""
    monkeypatch.setattr(rule, "CANDIDATE_PROMPTS", 2)
    monkeypatch.setattr(rule, "LOOKS", (2, 3))


@pytest.fixture
def neutral(llama, monkeypatch):
    """``neutral(...)``: an engine over the small model, without a server around it."""
    monkeypatch.setattr(engines.model_view, "served_model", lambda runner: llama)
    runner = SimpleNamespace(attn_backend=SimpleNamespace(canopy_plan=None))

    def made(**options) -> ChunkEngine:
        return ChunkEngine(runner, Options(memory_mb=64, **options), Tokenizer())

    return made


@pytest.fixture
def own(neutral):
    """The same, where a tenant's own documents may stand in."""

    def made(**options) -> ChunkEngine:
        return neutral(**{"encode": "standin", "stand_in": "corpus", **options})

    return made


def see(engine: ChunkEngine, *orders, salt: str | None = None) -> None:
    for i, order in enumerate(orders):
        learn(engine, request(*prompt(order, i), salt=salt))


def win(engine: ChunkEngine, salt: str | None = None) -> rule.OwnDocuments:
    """Documents 1 and 2 of a tenant are tried, and win."""
    see(engine, (1, 2, 3), (1, 2, 4), salt=salt)
    for i in range(2):
        see(engine, (5 + i, 6 + i), salt=salt)
        engine.stand_ins.measured(*engine.stand_ins.take(), 1.0, 0.5 + 0.01 * i)
    found = engine.stand_ins.in_force(salt)
    assert found is not None
    return found


def own_keys(engine: ChunkEngine) -> list[str]:
    return [key for key, *_ in engine.store.listing() if key.endswith(OWN)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs --canopy-chunk-encode standin or mixed; prefix"),
        ({"encode": "alone"}, "needs --canopy-chunk-encode standin or mixed; alone"),
        ({"mode": "prefix", "encode": "standin"}, "mode prefix reuses nothing"),
    ],
)
def test_where_nothing_stands_in_it_is_refused_by_name(options, said) -> None:
    with pytest.raises(CanopyError, match=said):
        Options(stand_in="corpus", **options)


def test_by_default_the_neutral_ones_stay_and_nothing_is_measured(neutral) -> None:
    engine = neutral(encode="standin")
    see(engine, *[(1, 2, 3 + i) for i in range(9)])
    assert not engine.has_idle_work
    assert not engine.stand_ins.tenants
    assert engine.stats()["stand_ins"] == {}
    assert not own_keys(engine)


@pytest.mark.parametrize("how", ["standin", "mixed"])
def test_documents_are_encoded_behind_what_won_and_served_as_they_are_until_then(
    own, llama, how
) -> None:
    engine = own(encode=how)
    pair = win(engine)
    assert pair.tokens == (*document(1), *document(2))  # nothing is between documents here
    head = tuple(range(20, 20 + SYSTEM))
    later, neutral = head + pair.tokens, head + engine.stand_in
    first = neutral if how == "standin" else head
    asked = request(*prompt((3, 5, 6)))
    assert held(engine, asked)[1:] == [head if how == "mixed" else neutral, neutral]
    learn(engine, asked)
    assert held(engine, asked) == [later if how == "standin" else first, later, later]
    got = engine.store.get(engine.new_request(asked).keys[1][0])
    want = encode(llama, document(5), later)
    torch.testing.assert_close(got.raw_k, want.raw_k, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(got.v, want.v, atol=2e-5, rtol=1e-4)
    assert set(own_keys(engine)) == engine.stand_ins.tenants[None].keys


def test_a_document_does_not_stand_in_for_itself(own) -> None:
    engine = own()
    win(engine)
    asked = request(*prompt((9, 1, 2)))
    learn(engine, asked)
    head = tuple(range(20, 20 + SYSTEM))
    assert held(engine, asked)[1:] == [head + engine.stand_in] * 2


def test_two_tenants_of_one_text_have_nothing_of_each_other(own) -> None:
    """Both bring the same documents, so that their own stand-ins are the same text."""
    engine = own()
    pair = win(engine, "a")
    assert engine.stand_ins.in_force("b") is None
    see(engine, (3, 5, 6), salt="a")
    theirs = request(*prompt((3, 5, 6)), salt="b")
    assert tiers(engine, theirs) == [None] * 3
    assert win(engine, "b").tokens == pair.tokens
    assert {p[-len(engine.stand_in) :] for p in held(engine, theirs) if p} <= {engine.stand_in}
    learn(engine, theirs)
    assert held(engine, theirs) == [tuple(range(20, 20 + SYSTEM)) + pair.tokens] * 3
    keys = {t: one.keys for t, one in engine.stand_ins.tenants.items()}
    assert not keys["a"] & keys["b"]
    assert set(own_keys(engine)) == keys["a"] | keys["b"]
    name = document_name(document(1), "a")
    assert not engine.document_command("delete", name, "b")
    assert set(own_keys(engine)) == keys["a"] | keys["b"], "another's name deletes nothing"
    assert engine.document_command("delete", name, "a")
    assert set(own_keys(engine)) == keys["b"]
    assert held(engine, theirs) == [tuple(range(20, 20 + SYSTEM)) + pair.tokens] * 3


def test_what_was_encoded_behind_a_deleted_document_goes_with_it(own) -> None:
    engine = own()
    win(engine)
    before = request(*prompt((3, 5, 6)))
    waits = request(*prompt((7, 8, 9)))
    learn(engine, before)
    state, running = engine.new_request(waits), engine.new_request(waits)
    state.fused = running.fused = True
    engine.encode_missing(waits, state, torch.arange(len(waits.origin_input_ids)))
    engine.encode_piece()  # one is under way, others wait
    name = document_name(document(2), None)
    key = f"canopy_chunk:delete:{name}:"
    assert run_commands(engine, [key]).updated
    assert not own_keys(engine)
    assert held(engine, before)[0] is not None, "neutral ones are still there"
    engine.encode_missing(waits, running, torch.arange(len(waits.origin_input_ids)))
    while engine.has_idle_work:
        engine.idle_piece()
    assert not own_keys(engine), "a request that had begun before encodes nothing behind it"
    kept = [engine.store.get(key) for key, *_ in engine.store.listing()]
    deleted = tuple(document(2))
    for chunk in kept:
        whole = (*chunk.prefix, *chunk.ids)
        assert not any(whole[i : i + LENGTH] == deleted for i in range(len(whole)))
    prefix = engine.encoder._prefix
    assert prefix is None or prefix[0][-len(engine.stand_in) :] == engine.stand_in


def test_after_a_restart_neutral_ones_are_in_force_and_no_file_is_behind_others(
    own,
    neutral,
    tmp_path,
) -> None:
    options = {"disk_mb": 64, "directory": str(tmp_path)}
    first = own(**options)
    first.store._tiers[0].capacity_bytes = 0
    win(first)
    asked = request(*prompt((3, 5, 6)))
    learn(first, asked)
    assert list(tmp_path.rglob(f"*{OWN}.chunk"))
    again = own(**options)
    assert not list(tmp_path.rglob(f"*{OWN}.chunk"))
    assert tiers(again, asked) == ["disk"] * 3
    assert again.stand_ins.in_force(None) is None
    assert tiers(neutral(encode="standin", **options), asked) == ["disk"] * 3


def test_at_ratio_1_nothing_is_approximate(own, llama) -> None:
    engine = own()
    win(engine)
    asked = request(*prompt((3, 5, 6)))
    learn(engine, asked)
    assert all(key.endswith(OWN) for key, *_ in engine.new_request(asked).keys)
    found = engine.resolve(engine.new_request(asked), touch=True)
    ids = torch.tensor(asked.origin_input_ids)
    fused = FusedPrompt(ids, tuple(one.placed_from(0) for one in found))
    got = fused_prefill(llama, fused, dense_cache(llama, len(ids)), make_selector("asked"), 1.0)
    plain = last_logits(llama, asked.origin_input_ids)
    torch.testing.assert_close(got.logits, plain, atol=1e-4, rtol=1e-4)


def last_logits(model, ids):
    whole = torch.tensor(ids)
    return logits(model, prefill(model, whole, dense_cache(model, len(ids))))[-1]


def true_kl(model, ids, bounds, behind, ratio) -> float:
    """By another way: each prompt whole, the answer's tokens one after the other."""
    placed = [Placed(encode(model, ids[a:b], behind), a) for a, b in bounds]
    n, answer, total = len(ids), [], 0.0
    rows = []
    for _ in range(ANSWER_TOKENS):
        rows.append(last_logits(model, [*ids, *answer]).log_softmax(-1))
        answer.append(int(rows[-1].argmax()))
    cache = dense_cache(model, n + ANSWER_TOKENS)
    prompt = FusedPrompt(torch.tensor(ids), tuple(placed))
    row = fused_prefill(model, prompt, cache.upto(n), make_selector("asked"), ratio).logits
    for i in range(ANSWER_TOKENS):
        other = row.log_softmax(-1)
        total += float((rows[i].exp() * (rows[i] - other)).sum())
        at = torch.tensor(answer[i : i + 1])
        row = logits(model, prefill(model, at, cache.upto(n + i + 1), n + i))[-1]
    return total / ANSWER_TOKENS


@pytest.fixture
def waiting(own):
    """An engine on trial with a prompt to measure, and that prompt."""
    engine = own(ratio=0.3)
    see(engine, (1, 2, 3), (1, 2, 4))
    learn(engine, request(*prompt((5, 6, 7))))
    assert engine.trials.busy
    return engine, engine.stand_ins.tenants[None].waiting


def test_a_trial_measures_what_reuse_loses_behind_both(waiting, llama) -> None:
    engine, asked = waiting
    stored = len(engine.store)
    steps = 0
    while engine.trials.busy:
        engine.idle_piece()
        steps += 1
    ((neutral, own_kl),) = engine.stand_ins.tenants[None].kl
    head = list(asked.ids[: asked.head])
    about = (llama, list(asked.ids), asked.bounds)
    assert neutral == pytest.approx(true_kl(*about, [*head, *engine.stand_in], 0.3), abs=1e-4)
    pair = engine.stand_ins.tenants[None].own.tokens
    assert own_kl == pytest.approx(true_kl(*about, [*head, *pair], 0.3), abs=1e-4)
    assert neutral != own_kl
    assert steps > 10, "in pieces, between which a request may come"
    assert len(engine.store) == stored, "nothing of it is kept"
    assert engine.counts["fallbacks"] == 0
    assert engine.stand_ins.in_force(None) is None


def test_a_trial_gives_way_at_every_layer_and_goes_on_where_it_was(waiting, llama) -> None:
    """Between any two pieces requests are served and chunks encoded; it measures the same."""
    engine, asked = waiting
    pair = engine.stand_ins.tenants[None].own
    undisturbed = engine.trials._work(asked, pair)
    pieces = 0
    while engine.trials.busy:
        engine.encoder.enqueue(document(30 + pieces % 7), (pieces % 5,), "")
        engine.encode_piece()
        engine.trials.step()
        pieces += 1
    fused = 2 * llama.shape.layers
    assert pieces > fused
    assert engine.stand_ins.tenants[None].kl == [run_whole(undisturbed)]


def run_whole(work):
    """A generator's return value."""

    def wrapped():
        found.append((yield from work))

    found: list = []
    for _ in wrapped():
        pass
    return found[0]


def test_a_system_text_that_is_too_long_to_encode_is_not_in_a_trial_either(
    own, llama, monkeypatch
) -> None:
    monkeypatch.setattr(requests, "LEARN_PREFIX_TOKENS", SYSTEM - 1)
    engine = own(ratio=0.3)
    see(engine, (1, 2, 3), (1, 2, 4), (5, 6, 7))
    asked = engine.stand_ins.tenants[None].waiting
    while engine.trials.busy:
        engine.idle_piece()
    ((got, _),) = engine.stand_ins.tenants[None].kl
    want = true_kl(llama, list(asked.ids), asked.bounds, engine.stand_in, 0.3)
    assert got == pytest.approx(want, abs=1e-4)


def test_chunks_that_wait_come_before_a_trial(waiting) -> None:
    engine, _ = waiting
    engine.encoder.enqueue(document(8), (), "")
    engine.idle_piece()
    assert not engine.encoder.busy
    assert engine.trials._job is None


def test_a_prompt_that_cannot_be_measured_is_left_out_and_counted(waiting, monkeypatch) -> None:
    from canopy_chunks import stand_in_trial

    engine, _ = waiting
    monkeypatch.setattr(stand_in_trial, "fused_steps", lambda *_: 1 / 0)
    while engine.trials.busy:
        engine.idle_piece()
    assert engine.counts["fallbacks"] == 1
    assert engine.stand_ins.tenants[None].kl == []


def test_a_deletion_ends_the_measurement_of_a_prompt_under_way(waiting) -> None:
    engine, _ = waiting
    engine.idle_piece()
    assert engine.trials._job is not None
    engine.document_command("delete", document_name(document(6), None), None)
    assert not engine.trials.busy


def test_other_weights_begin_anew(own, monkeypatch) -> None:
    engine = own()
    win(engine)
    see(engine, (3, 5, 6))
    other = dataclasses.replace(engine.model, identity="other weights")
    monkeypatch.setattr(engines.model_view, "served_model", lambda runner: other)
    assert engine.weights_changed()
    assert engine.stand_ins.in_force(None) is None
    assert not own_keys(engine)
    assert engine.trials.model is other


def test_a_trial_takes_no_more_memory_than_is_set_aside(own) -> None:
    engine = own()
    see(engine, (1, 2, 3), (1, 2, 4))
    asked = request(*prompt(range(5, 25)))
    learn(engine, asked)
    with Peak() as peak:
        while engine.trials.busy:
            engine.idle_piece()
    n, shape = len(asked.origin_input_ids), engine.model.shape
    set_aside = working_memory(shape, 4, n, 0, n)
    assert peak.most > n * shape.kv_bytes_per_token * 4
    assert peak.most <= set_aside.total
    assert set_aside.total > working_memory(shape, 4, n, 0).total


def test_a_request_says_how_many_of_its_chunks_are_behind_own_documents(own) -> None:
    from canopy_chunks.server.plan import _own_report

    engine = own()
    asked = request(*prompt((1, 5, 6)))
    state = engine.new_request(asked)
    assert _own_report(state, engine.resolve(state)) == {}
    win(engine)
    learn(engine, asked)
    state = engine.new_request(asked)
    assert _own_report(state, engine.resolve(state)) == {"own_stand_ins": 2}
