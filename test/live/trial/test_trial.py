"""A trial: fair turns, few interim looks, and the previous policy unless the answer is certain."""

import random

import pytest

from canopy_lab.cli import trial
from canopy_lab.live.trial import turns
from canopy_lab.live.trial.turns import LOOKS, Counts, pairs, standing
from sglang_canopy.errors import CanopyError


class FakeServer:
    """Hits by policy, with noise and a trend over time; time passes as a trial waits."""

    def __init__(self, hits: dict[str, float], noise: float = 0.01, trend: float = 0.0) -> None:
        self.hits, self.noise, self.trend = hits, noise, trend
        self.now = self.prompts = self.found = 0.0
        self.running, self.exchanged = "canopy-lru", list[str]()
        self.draw = random.Random(1)
        self.floor, self.evicts = False, True

    def wait(self, seconds: float) -> None:
        ratio = self.hits[self.running] + self.trend * self.now + self.draw.gauss(0, self.noise)
        self.now += seconds
        self.prompts += 1000 * seconds
        self.found += 1000 * seconds * ratio

    def counts(self) -> Counts:
        evicted = int(self.prompts) if self.evicts else 0
        return Counts(int(self.prompts), int(self.found), self.running, evicted_tokens=evicted)

    def exchange(self, policy: str) -> None:
        self.exchanged.append(policy)
        self.running = "canopy-lru" if self.floor else policy

    def status(self):
        return {"whatif": None}


def test_a_clear_gain_is_sure_at_the_first_look() -> None:
    server = FakeServer({"wa": 0.5, "canopy-lru": 0.4})
    found = list(pairs(server, "wa", "canopy-lru", 60, server.wait))
    assert len(found) == LOOKS[0]
    last = found[-1].so_far
    assert last.verdict == turns.BETTER
    assert last.low < 10 < last.high
    assert server.exchanged.count("wa") == server.exchanged.count("canopy-lru") == LOOKS[0]


def test_a_trend_in_the_traffic_favours_neither() -> None:
    server = FakeServer({"wa": 0.4, "canopy-lru": 0.4}, noise=0.0, trend=2e-5)
    *_, last = pairs(server, "wa", "canopy-lru", 60, server.wait)
    assert last.so_far.verdict in (turns.SAME, turns.UNSURE)
    firsts = server.exchanged[::2]
    assert {"wa", "canopy-lru"} == set(firsts)


def test_by_hand() -> None:
    found = standing([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])  # s = .894, t(5) at 1 - 1/240 = 4.18
    assert found.points == pytest.approx(2.0)
    assert found.high - found.points == pytest.approx(4.18 * 0.8944 / 6**0.5, rel=0.01)
    assert found.verdict == turns.BETTER
    assert standing([-1.0, -2.0, -3.0, -1.0, -2.0, -3.0]).verdict == turns.WORSE
    assert standing([0.1, -0.1, 0.1, -0.1, 0.1, -0.1]).verdict == turns.SAME
    assert standing([9.0, -9.0] * 3).verdict is None
    assert standing([1.0, 2.0, 3.0]).verdict is None  # between two looks


@pytest.mark.parametrize(("floor", "says"), [(True, "floor=off"), (False, "a trial needs traffic")])
def test_a_floor_that_takes_over_or_a_server_without_requests_ends_it(floor, says) -> None:
    server = FakeServer({"wa": 0.5, "canopy-lru": 0.4})
    server.floor = floor
    wait = server.wait if floor else lambda seconds: None
    with pytest.raises(CanopyError, match=says):
        list(pairs(server, "wa", "canopy-lru", 60, wait))


def test_a_restarted_server_ends_the_trial() -> None:
    """Its counters begin at 0: the hits of a slice would be less than none."""
    server = FakeServer({"wa": 0.5, "canopy-lru": 0.4})

    def wait(seconds: float) -> None:
        server.wait(seconds)
        if server.now == 240:  # within the part of a slice that counts
            server.prompts, server.found = 5.0, 4.0

    with pytest.raises(CanopyError, match="was restarted"):
        list(pairs(server, "wa", "canopy-lru", 60, wait))


@pytest.fixture
def command(monkeypatch, capsys):
    """Run ``canopy trial`` on a made-up server; return its status and output."""

    def run(server: FakeServer, meter=None, **options):
        monkeypatch.setattr(trial, "RunningServer", lambda url, key: server)
        monkeypatch.setattr(trial.time, "sleep", server.wait)
        monkeypatch.setattr(server, "status", lambda: {"whatif": meter}, raising=False)
        return trial.run(trial.Options(**options)), capsys.readouterr().out

    return run


def test_the_winner_stays_and_the_undo_command_is_printed(command) -> None:
    server = FakeServer({"wa": 0.5, "canopy-lru": 0.4})
    status, said = command(server)
    assert (status, server.running) == (0, "wa")
    assert "wa is better than canopy-lru" in said
    assert "--radix-eviction auto" in said
    assert '-d \'{"device": "canopy-lru"}\'' in said


@pytest.mark.parametrize("hits", [0.4, 0.3])
def test_without_a_gain_the_server_is_as_before(command, hits) -> None:
    server = FakeServer({"wa": hits, "canopy-lru": 0.4}, noise=0.001)
    status, said = command(server)
    assert (status, server.running) == (1, "canopy-lru")
    assert said.rstrip().endswith("canopy-lru ranks again.")


def test_the_previous_policy_ranks_again_after_any_trial(command) -> None:
    server = FakeServer({"wa": 0.4, "canopy-lru": 0.4, "threshold-lru": 0.4}, noise=0.001)
    server.running = "threshold-lru"
    status, said = command(server)
    assert (status, server.running) == (1, "threshold-lru")
    assert said.rstrip().endswith("threshold-lru ranks again.")
    worse = FakeServer({"wa": 0.3, "canopy-lru": 0.4}, noise=0.001)
    worse.running = "wa"
    status, said = command(worse)
    assert (status, worse.running) == (1, "canopy-lru")
    assert said.rstrip().endswith("canopy-lru ranks now.")


def test_a_failed_trial_first_restores_the_policy(command) -> None:
    server = FakeServer({"wa": 0.5, "canopy-lru": 0.4})
    server.counts = lambda: Counts(0, 0, server.running)
    with pytest.raises(CanopyError):
        command(server)
    assert server.running == "canopy-lru"


def arm(hits: float, error: float):
    return {"policy": "wa", "capacity": "now", "saved_share": hits, "saved_share_error": error}


@pytest.mark.parametrize(
    ("meter", "says"),
    [
        ({"undecided": "too few requests: 5 of 200", "arms": []}, "too few requests: 5 of 200"),
        ({"undecided": None, "arms": [arm(0.4, 0.001)]}, "+0.0 ± 0.2 points, too little to try"),
    ],
)
def test_the_meter_is_read_first(command, meter, says) -> None:
    server = FakeServer({"wa": 0.5, "canopy-lru": 0.4})
    status, said = command(server, {"running": "canopy-lru", "saved_share": 0.4, **meter})
    assert (status, server.exchanged) == (1, [])
    assert says in said


class Priced(FakeServer):
    """``wa`` hits more tokens, in short prompts; ``canopy-lru`` fewer, in long ones."""

    def __init__(self) -> None:
        super().__init__({"wa": 0.5, "canopy-lru": 0.4}, noise=0.001)
        self.squares = 0.0

    def wait(self, seconds: float) -> None:
        before = self.found
        super().wait(seconds)
        depth = {"wa": 1_000, "canopy-lru": 50_000}[self.running]
        self.squares += (self.found - before) * depth

    def counts(self) -> Counts:
        plain = super().counts()
        return plain._replace(
            prompt_squares=40_000 * plain.prompt_tokens,
            hit_squares=int(self.squares),
            depth_scale=10_000.0,
        )


def test_the_verdict_is_by_seconds_and_hits_are_shown(command) -> None:
    status, said = command(Priced())
    assert status == 1
    assert "Wa is worse than canopy-lru" in said
    assert "points of the prefill seconds" in said
    assert "hits 50." in said
    status, said = command(FakeServer({"wa": 0.5, "canopy-lru": 0.4}))
    assert "points of the prompt tokens" in said  # seconds are not measured


def test_a_cache_that_evicts_nothing_shows_no_difference_between_policies(command) -> None:
    server = FakeServer({"wa": 0.4, "canopy-lru": 0.4}, noise=0.0)
    server.evicts = False
    status, text = command(server)
    assert (status, server.running) == (1, "canopy-lru")
    assert server.exchanged.count("wa") == LOOKS[0]
    assert "Not tried: nothing was evicted" in text
    assert "No difference" not in text


def test_a_stopped_trial_prints_its_result_so_far(monkeypatch, capsys) -> None:
    server = FakeServer({"wa": 0.5, "canopy-lru": 0.4})

    def wait(seconds: float) -> None:
        server.wait(seconds)
        if server.now > 400:
            raise KeyboardInterrupt

    monkeypatch.setattr(trial, "RunningServer", lambda url, key: server)
    monkeypatch.setattr(trial.time, "sleep", wait)
    with pytest.raises(KeyboardInterrupt):
        trial.run(trial.Options())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Stopped before a verdict: wa against canopy-lru +10.")
    assert last.endswith("3 pairs. canopy-lru ranks again.")
    assert server.running == "canopy-lru"


def test_a_policy_is_not_tried_against_itself() -> None:
    with pytest.raises(CanopyError, match="both wa"):
        trial.Options(policy="wa", against="wa")


def test_the_line_of_a_pair_has_a_legend(command) -> None:
    _, text = command(FakeServer({"wa": 0.5, "canopy-lru": 0.4}))
    assert text.index("A pair: the share of the prefill seconds") < text.index("pair 1:")


class Waves(FakeServer):
    """Traffic in waves. ``share``: hits by policy, equal in the shadow caches."""

    def __init__(self, hits: dict[str, float], share: dict[str, float]) -> None:
        super().__init__(hits)
        self.share, self.shadows = share, dict.fromkeys(hits, 0.0)

    def wait(self, seconds: float) -> None:
        wave = self.draw.uniform(0.0, 0.3)
        self.now += seconds
        self.prompts += 1000 * seconds
        would = {name: hit + wave * self.share[name] for name, hit in self.hits.items()}
        self.found += 1000 * seconds * would[self.running]
        for name, ratio in would.items():
            self.shadows[name] += 1000 * seconds * ratio

    def counts(self) -> Counts:
        asked, shadows = int(self.prompts), {k: int(v) for k, v in self.shadows.items()}
        return Counts(asked, int(self.found), self.running, asked, shadows, evicted_tokens=asked)


def test_hits_under_any_policy_cancel_out() -> None:
    server = Waves({"wa": 0.43, "canopy-lru": 0.4}, {"wa": 1.0, "canopy-lru": 1.0})
    found = list(pairs(server, "wa", "canopy-lru", 60, server.wait))
    assert len(found) == LOOKS[0]
    assert found[-1].so_far.points == pytest.approx(3.0, abs=0.01)
    alone = FakeServer({"wa": 0.43, "canopy-lru": 0.4}, noise=0.1)
    assert len(list(pairs(alone, "wa", "canopy-lru", 60, alone.wait))) > LOOKS[0]


def test_hits_under_one_policy_count_half_in_both_slices() -> None:
    """Both slices of a pair have it: half of its luck in place of all."""
    server = Waves({"wa": 0.4, "canopy-lru": 0.4}, {"wa": 1.0, "canopy-lru": 0.0})
    *_, last = pairs(server, "wa", "canopy-lru", 60, server.wait)
    assert last.so_far.verdict == turns.BETTER
    ours, theirs = last.policy, last.against
    assert ours.shadow == pytest.approx((ours.hit + 0.4) / 2, abs=1e-4)
    assert last.points == pytest.approx(100 * (ours.shadow + theirs.shadow - 0.8), abs=0.02)


def test_a_policy_without_an_early_shadow_is_judged_by_the_others() -> None:
    server = Waves({"wa": 0.43, "canopy-lru": 0.4}, {"wa": 1.0, "canopy-lru": 1.0})
    del server.shadows["wa"]
    server.wait = lambda seconds: (
        server.shadows.setdefault("wa", 0.0),
        Waves.wait(server, seconds),
    )
    first = next(pairs(server, "wa", "canopy-lru", 60, server.wait))
    assert first.against.shadow == pytest.approx(first.against.hit, abs=1e-4)
