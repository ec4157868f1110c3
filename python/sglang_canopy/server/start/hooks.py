"""Table of all hooks on SGLang's functions."""

from __future__ import annotations

from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, live_names
from sglang_canopy.request import prompt
from sglang_canopy.server.http import entry, routes, shutdown
from sglang_canopy.server.scheduler import admission, arrivals, received
from sglang_canopy.server.start import arguments, secrets
from sglang_canopy.server.start.hook import Hook
from sglang_canopy.server.start.self_check import check_complete, check_in_place, stop
from sglang_canopy.storage import weights

_SRT = "sglang.srt."


def _check_arguments(result: Any, _cls: Any, args: Any) -> None:
    check_in_place(HOOKS)
    arguments.check_arguments(result, args)


def _build_cache(original: Any, ctx: Any) -> Any:
    check_in_place(HOOKS)
    if ctx.params.eviction_policy == AUTO:
        stop(
            "radix_eviction_policy 'auto' is read from a command line, and this server was started "
            "without one; give 'wa' here, or start it with python -m sglang.launch_server"
        )
    if ctx.params.eviction_policy not in live_names():
        return original(ctx)
    check_complete()
    from sglang_canopy.server.scheduler.cache_factory import build_cache

    try:
        return build_cache(ctx)
    except CanopyError as error:
        stop(str(error))


HOOKS = (
    Hook(
        _SRT + "server_args.ServerArgs.add_cli_args",
        "after",
        arguments.add_flags,
        ("parser",),
        "add Canopy's flags",
    ),
    Hook(
        _SRT + "server_args.prepare_server_args",
        "before",
        arguments.expand_arguments,
        ("argv",),
        "expand `--radix-eviction` and `auto`, also in the file of `--config`",
    ),
    Hook(
        _SRT + "server_args.ServerArgs.from_cli_args",
        "after",
        _check_arguments,
        ("cls", "args"),
        "check the flags, and that every hook is in place",
    ),
    Hook(
        _SRT + "entrypoints.http_server.launch_server",
        "before",
        routes.add_routes,
        ("server_args",),
        "add Canopy's routes, and a step that refuses wrong fields before a stream starts",
    ),
    Hook(
        _SRT + "mem_cache.registry.default_radix_cache_factory",
        "around",
        _build_cache,
        ("ctx",),
        "build Canopy's cache for a Canopy policy; repeat the checks",
    ),
    Hook(
        _SRT
        + "managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        "after",
        received.stamp_received,
        ("self",),
        "stamp requests that bypassed the HTTP entry, on the rank that receives them",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler._create_generation_req",
        "after",
        arrivals.register_created,
        ("self", "recv_req"),
        "register a request, in order of arrival",
        "requests are registered when they are queued",
        is_on_first_request=True,
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler.send_abort_output",
        "after",
        arrivals.end_aborted,
        ("self", "abort_req", "req"),
        "count a request that ends before admission as refused",
        "requests that leave the queue are not counted",
    ),
    Hook(
        _SRT + "managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        "before",
        arrivals.admit_batch,
        ("self",),
        "announce admitted requests to the policies",
        is_on_first_request=True,
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler._add_request_to_queue",
        "before",
        arrivals.register_queued,
        ("self", "req"),
        "count an invalid request as refused; register a request with images, once they have tokens, "
        "and one with documents, once it has its extra key; protect the cached prefix of a request that "
        "will wait",
        is_on_first_request=True,
    ),
    Hook(
        _SRT + "managers.schedule_policy.SchedulePolicy.calc_priority",
        "around",
        admission.arrange_queue,
        ("self", "waiting_queue", "running_batch", "processed_tokens"),
        "`--canopy-queue-order`: sort the queue; renew the protection of its prefixes",
        is_on_first_request=True,
    ),
    Hook(
        _SRT + "managers.schedule_policy.SchedulePolicy.shortest_prefill_chunk_limit",
        "around",
        admission.limit_chunk,
        ("self", "chunked_req", "waiting_queue", "budget", "page_size"),
        "`--canopy-queue-order`: shorter requests share the steps of a long prompt",
    ),
    Hook(
        _SRT + "managers.schedule_policy.PrefillAdder._select_prefill_admission",
        "around",
        admission.refuse_second_chunk,
        (
            "self",
            "req",
            "total_tokens",
            "host_hit_length",
            "swa_host_hit_length",
            "truncation_align_size",
            "has_chunked_req",
        ),
        "allow one unfinished prompt per batch; admit only whole prompts beside it",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler.process_batch_result",
        "after",
        admission.record_batch_result,
        ("self", "batch", "result"),
        "record prefill costs for the queue's order, and ended requests for `--canopy-observe`",
        is_on_first_request=True,
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler._abort_on_queued_limit",
        "around",
        admission.enqueue_unrefused,
        ("self", "recv_req"),
        "`--canopy-session-gate`: pass a request that SGLang does not refuse to the gate",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "around",
        admission.choose_prefill,
        ("self", "prefill_delayer_single_pass", "running_batch"),
        "`--canopy-session-gate`: choose batches among the requests that the gate admits",
        is_on_first_request=True,
    ),
    Hook(
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "after",
        entry.stamp_chat,
        ("self", "request", "raw_request"),
        "check a chat request's fields, infer missing ones, and stamp its arrival",
    ),
    Hook(
        _SRT + "entrypoints.anthropic.serving.AnthropicServing._convert_to_chat_completion_request",
        "before",
        entry.drop_billing_line,
        ("self", "anthropic_request"),
        "leave Claude Code's billing line out of the prompt",
    ),
    Hook(
        _SRT + "managers.tokenizer_manager.TokenizerManager.generate_request",
        "around",
        entry.stamp_generation,
        ("self", "obj", "request"),
        "check, infer and stamp, for every other route",
    ),
    Hook(
        _SRT + "managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "before",
        prompt.check_prompt,
        ("self", "obj", "input_ids"),
        "refuse prompts that end SGLang's scheduler",
    ),
    Hook(
        _SRT + "managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "after",
        prompt.check_message,
        ("self",),
        "refuse sampling parameters that end SGLang's scheduler",
        "such a request ends SGLang's scheduler",
    ),
    Hook(
        _SRT + "managers.tokenizer_manager.TokenizerManager._get_scheduler_first_token_time",
        "after",
        entry.record_first_token,
        ("state", "recv_obj", "i"),
        "fit TTFT as a line over uncached tokens",
        "the status has no TTFT line, and policies use no measured prefill time",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler.set_internal_state",
        "around",
        arrivals.receive_messages,
        ("self", "recv_req"),
        "pass the messages of Canopy's routes to every scheduler",
    ),
    Hook(
        _SRT + "managers.tokenizer_manager.SignalHandler.sigterm_handler",
        "before",
        shutdown.extend_shutdown,
        ("self", "signum", "frame"),
        "`--canopy-drain-s`: begin the time for the drain",
        "SGLang ends a drain after 15 s",
    ),
    Hook(
        _SRT + "sampling.watermarking.core.redact_watermark_secrets",
        "after",
        secrets.redact_keys,
        ("value",),
        "redact keys and passwords in `/server_info`",
        "SGLang shows them there",
    ),
    *(
        Hook(*hook, purpose="key KV on disk by the weights that computed it")
        for hook in weights.HOOKS
    ),
)
"""All hooks on SGLang's functions, except the hooks of further plugins (``addon.py``)."""
