"""``canopy documents calibrate``: measure which share of a document a server should recompute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canopy_lab.cli.shared import ConnectionOptions
from canopy_lab.cli.values import out_file
from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.wire.stamp import BOUNDS, DOCUMENTS, RATIO

ENCODING_TIMEOUT_S = 600
"""Maximum seconds for the server to encode the sample documents."""


@dataclass(frozen=True, slots=True)
class Options(ConnectionOptions, declared.Checked):
    url: str = declare(
        None, "--url", "an idle server with --canopy-documents on", metavar="URL", required=True,
    )  # fmt: skip
    out: Path = declare(
        None, "--out", "JSON file to save into; others in it are kept", metavar="FILE",
        parse=out_file, required=True,
    )  # fmt: skip
    floor: float = declare(0.15, "--floor", "smallest ratio allowed", metavar="R", low=0, high=1)


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Time a server's first tokens at ratios from the given floor up, and save the best ratio."""
    from canopy_documents.calibration.saved import Calibrations, Setting
    from canopy_documents.calibration.served import ServedPrompts, calibrate_server
    from canopy_lab.live.profile.client import ProfiledServer

    server = ProfiledServer(args.url, args.key)
    served_setting = server.scheduler_state(DOCUMENTS).get("setting")
    if served_setting is None:
        raise CanopyError(
            f"{server.url} does not reuse documents; start it with --canopy-documents on"
        )
    prompts = ServedPrompts(_make_sender(server), _make_encoding_wait(server), server.token_range)
    prompts.learn()
    calibration, search = calibrate_server(prompts, args.floor)
    for ratio, seconds in sorted(search.probes):
        print(f"ratio {ratio:.3f}  first token {seconds:.3f} s")
    setting = Setting(**served_setting)
    Calibrations(args.out).put(setting, prompts.tier, calibration)
    cost = calibration.profile
    balance = f"{cost.prior_ratio(0, 1):.3f}" if cost.compute_s > 0 else "unknown: too noisy"
    print(
        f"{prompts.tier}: ratio {calibration.ratio:.3f}, TTFT {search.ttft_s:.3f} s; computing a token "
        f"{1e6 * cost.compute_s:.0f} us, bringing one {1e6 * cost.transfer_s:.0f} us, a prompt at any "
        f"ratio {1e3 * cost.other_s:.0f} ms (equation 11: {balance})"
    )
    print(
        f"saved in {args.out} for {setting.dtype}, --tp-size {setting.tp_size}, {setting.backend}, "
        f"{setting.device}; serve with --canopy-documents calibration={args.out}"
    )
    return 0


def _make_sender(server: Any) -> Any:
    def send_prompt(ids: Any, bounds: Any, ratio: float | None) -> tuple[float, dict[str, Any]]:
        server.flush()  # kept KV of the same prompt would not be reuse of documents
        params = {BOUNDS: list(bounds), **({} if ratio is None else {RATIO: ratio})}
        seconds, meta_info = server.first_token(list(ids), params)
        report = meta_info.get(DOCUMENTS) or {}
        return seconds, report[0] if isinstance(report, list) else report

    return send_prompt


def _make_encoding_wait(server: Any) -> Any:
    from canopy_lab.live.profile.client import wait_until

    def wait_encoded() -> None:
        is_encoded = lambda: not server.scheduler_state(DOCUMENTS).get("waiting_documents")  # noqa: E731
        if not wait_until(is_encoded, ENCODING_TIMEOUT_S, 0.5):
            raise CanopyError(
                f"the server has not encoded the documents after {ENCODING_TIMEOUT_S // 60} minutes"
            )

    return wait_encoded
