"""The simulator's reservation for outputs of unknown length, compared with SGLang's own objects."""

from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from canopy_lab.sim.system import SystemConfig, Workload
from canopy_lab.sim.system.arrivals import OpenLoop
from canopy_lab.sim.system.job import SimulatedRequest
from canopy_lab.sim.system.reservation import CLIP_OUTPUT_TOKENS, NewTokenRatio, Reservation
from canopy_lab.sim.system.run import _SystemRun, simulate_system
from support.bare_adder import bare_adder
from support.systems import profile, request


def run(trace, **fields):
    fields = {"device_tokens": 10_000, "quantum_tokens": 1, **fields}
    return simulate_system(trace, SystemConfig(**fields), profile())


def sglang_tracker(conservativeness: float):
    module = pytest.importorskip("sglang.srt.managers.scheduler_components.new_token_ratio_tracker")
    with pytest.MonkeyPatch.context() as patch:
        schedule_config = SimpleNamespace(schedule_conservativeness=conservativeness)
        patch.setattr(module, "get_schedule", lambda: schedule_config)
        return module.NewTokenRatioTracker.from_config()


@given(
    conservativeness=st.sampled_from([0.3, 1.0, 1.7]),
    decode_steps=st.lists(st.integers(0, 300), max_size=6),
    jobs=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), min_size=1, max_size=6),
)
def test_the_ratio_decays_and_is_estimated_again_as_in_sglang(conservativeness, decode_steps, jobs):
    tracker, ratio = sglang_tracker(conservativeness), NewTokenRatio(conservativeness)
    for steps in decode_steps:
        for _ in range(steps):
            tracker.decay_step()
        ratio.record_decode(steps)
        assert ratio.current == pytest.approx(tracker.current)
    running = [
        SimpleNamespace(
            output_ids=[0] * generated,
            sampling_params=SimpleNamespace(max_new_tokens=generated + remaining),
        )
        for generated, remaining in jobs
    ]
    tracker.current = tracker.estimate_new_token_ratio_after_retract(running)
    generated_tokens = sum(generated for generated, _ in jobs)
    ratio.record_retraction(generated_tokens, sum(map(sum, jobs)), len(jobs))
    assert ratio.current == pytest.approx(tracker.current)
    tracker.reset()
    ratio.reset()
    assert ratio.current == pytest.approx(tracker.current)


@given(st.lists(st.tuples(st.integers(0, 2500), st.integers(1, 12000), st.booleans()), max_size=20))
def test_the_reserved_tokens_are_the_sum_over_jobs(changes):
    reserved, running, step = Reservation(), [], 0
    for elapsed_steps, missing_steps, removes_first in changes:
        step += elapsed_steps
        if removes_first and running:
            removed, _ = running.pop(0)
            reserved.remove(removed)
        job = make_job(len(running), 1, 1, 0)
        reserved.add(job, step + missing_steps, step)
        running.append((job, step + missing_steps))
        # A job that is done was removed.
        for finished_job, end_step in [entry for entry in running if entry[1] < step]:
            reserved.remove(finished_job)
            running.remove((finished_job, end_step))
        missing_tokens = sum(min(end_step - step, CLIP_OUTPUT_TOKENS) for _, end_step in running)
        assert reserved.tokens(step) == missing_tokens


REQUESTS = st.tuples(st.integers(1, 60), st.integers(1, 40), st.sampled_from([0, 1, 50, 5000]))
"""Tokens of a prompt, of its output, and of the client's allowance beyond it."""


@settings(deadline=None, max_examples=150)
@given(
    running=st.lists(st.tuples(REQUESTS, st.integers(1, 40)), max_size=5),
    waiting=st.lists(REQUESTS, min_size=1, max_size=8),
    ratio=st.sampled_from([0.098, 0.3, 0.7]),
    are_fixed=st.booleans(),
    page_tokens=st.sampled_from([1, 8]),
    free_tokens=st.one_of(st.integers(70, 500), st.integers(4000, 30_000)),
)
def test_admissions_equal_sglangs_own(running, waiting, ratio, are_fixed, page_tokens, free_tokens):
    device_tokens = free_tokens + sum(
        prompt + min(generated, output) for (prompt, output, _), generated in running
    )
    for prompt, output, allowance in waiting:
        assume(prompt + min(output + allowance, CLIP_OUTPUT_TOKENS) + page_tokens < device_tokens)
    expected = admitted_by_sglang(running, waiting, ratio, are_fixed, page_tokens, free_tokens)
    system_run = _SystemRun(
        workload := Workload([request(0.0, (1,))]),
        SystemConfig(device_tokens=device_tokens, page_tokens=page_tokens, max_running=64, fixed_outputs=are_fixed),
        profile(), OpenLoop(workload),
    )  # fmt: skip
    (instance,) = system_run.instances
    for number, ((prompt, output, allowance), generated) in enumerate(running):
        job = make_job(number, prompt, output, allowance)
        generated = min(generated, output)
        instance.tree.private_tokens += prompt + generated
        job.private_tokens = prompt + generated
        instance.decoding.add(job, output - generated)
    instance.queue.jobs = [make_job(100 + i, *tokens) for i, tokens in enumerate(waiting)]
    instance.decoding.new_token_ratio.current = ratio
    queued = list(instance.queue.jobs)
    instance.prefilling.plan(0.0)
    assert [queued.index(job) for job, _ in instance.prefilling.batch] == expected


def make_job(number: int, prompt: int, output: int, allowance: int) -> SimulatedRequest:
    path = tuple(range(number * 1000, number * 1000 + prompt))
    trace_request = SimpleNamespace(path=path, tenant=None, conversation=None)
    job = SimulatedRequest(number, 0.0, trace_request, path, prompt, output, prompt + output - 1)
    job.max_new_tokens = output + allowance
    return job


def admitted_by_sglang(running, waiting, ratio, are_fixed, page_tokens, free_tokens) -> list[int]:
    """Return the numbers of the waiting requests that SGLang's own adder admits."""
    adder_class, policy = bare_adder(page_tokens)

    def params(output, allowance):
        return SimpleNamespace(max_new_tokens=output + allowance, ignore_eos=are_fixed)

    adder = adder_class(free_tokens, 8192, ratio)
    for (_, output, allowance), generated in running:
        req = SimpleNamespace(
            sampling_params=params(output, allowance), output_ids=[0] * min(generated, output)
        )
        adder.memory_budget.total_offset += adder._get_running_request_total_token_offset(req)
    admitted = []
    for i, (prompt, output, allowance) in enumerate(waiting):
        if adder.budget_state() is policy.AddReqResult.OTHER:
            break
        max_tokens = min(output + allowance, policy.CLIP_MAX_NEW_TOKENS)
        fits, _ = adder.memory_budget.check_prefill(
            extend_input_len=prompt, total_tokens=prompt + max_tokens + page_tokens, max_new_tokens=0,
            input_tokens=prompt, swa_host_hit_length=0, chunk_limit=adder.rem_chunk_tokens,
        )  # fmt: skip
        if not fits:
            break
        adder._update_prefill_budget(0, prompt, max_tokens, False)
        admitted.append(i)
        if adder.budget_state() is not policy.AddReqResult.CONTINUE:
            break
    return admitted


def test_a_batch_that_decoded_for_long_admits_more_unless_outputs_are_fixed():
    # 2 x (100 + 1,000) tokens do not fit 1,500, but after some hundred steps SGLang reserves a tenth of
    # the remaining tokens. Fixed outputs are reserved whole.
    long_request = request(0.0, range(1, 11), output_tokens=1000)
    trace = [long_request, request(6.5, range(101, 111), output_tokens=200)]
    assert run(trace, device_tokens=1500).ttft_s[1] < 0.2
    assert run(trace, device_tokens=1200, fixed_outputs=True).ttft_s[1] > 3.0


def test_excess_admissions_are_retracted_unless_outputs_are_fixed():
    # After 600 steps a tenth is expected of each, and each generates its maximum.
    trace = [request(0.0, range(1001, 1011), output_tokens=900)]
    for i in range(8):
        path = range(i * 10 + 1, i * 10 + 11)
        trace.append(request(6.5 + 0.3 * i, path, output_tokens=400))
    small_pool = run(trace, device_tokens=2_000)
    assert small_pool.retracted > 0
    assert (small_pool.e2e_s > 3.9).all()
    assert run(trace, device_tokens=2_000, fixed_outputs=True).retracted == 0


def test_a_retracted_request_does_not_wait_for_itself():
    # With prompts of equal length, order and times follow the arrivals.
    trace = [request(0.3 * i, range(i * 10 + 1, i * 10 + 11), output_tokens=400) for i in range(9)]
    first_come = run(trace, device_tokens=2_000)
    shortest_first = run(trace, device_tokens=2_000, schedule_policy="bounded-shortest")
    assert shortest_first.retracted == first_come.retracted > 0
    assert shortest_first.e2e_s == pytest.approx(first_come.e2e_s)


def test_a_more_conservative_setting_admits_later():
    long_request = request(0.0, range(1, 11), output_tokens=1000)
    trace = [long_request, request(1.0, range(101, 111), output_tokens=200)]
    assert run(trace, device_tokens=1250).ttft_s[1] < 0.2
    assert run(trace, device_tokens=1250, schedule_conservativeness=1.4).ttft_s[1] > 1.0


def test_the_ratio_restarts_when_the_queue_is_empty():
    system_run = _SystemRun(
        workload := Workload([request(time_s, (int(time_s) + 1,), output_tokens=100) for time_s in (0.0, 100.0)]),
        SystemConfig(device_tokens=1000), profile(), OpenLoop(workload),
    )  # fmt: skip
    ratios, (instance,) = [], system_run.instances
    plan = instance.prefilling.plan

    def record_ratio_and_plan(now_s):
        ratios.append(instance.decoding.new_token_ratio.current)
        return plan(now_s)

    instance.prefilling.plan = record_ratio_and_plan
    system_run.serve()
    assert ratios[0] == pytest.approx(0.7)
    assert max(ratios[1:]) == pytest.approx(0.7)
    assert min(ratios) == pytest.approx(0.7 - 99 * (0.7 - 0.098) / 600)
