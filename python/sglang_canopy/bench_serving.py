"""``python -m sglang_canopy.bench_serving``: ``sglang.bench_serving`` that can also replay traces.

All options and datasets of the original are unchanged. Canopy adds the datasets ``bailian``,
``mooncake`` (which replaces the original's, since that keeps no block lengths), ``agentic``
and ``sglang-log``, the options of ``live/replay/options.py`` and the backend ``openai``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from canopy_lab.live.replay import endpoint, options, report
from canopy_lab.live.replay.rates import replay_all
from canopy_lab.live.replay.replay_run import replace_names
from sglang_canopy.errors import CanopyError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status: 0, or 2 for a user's mistake."""
    try:
        result = run(sys.argv[1:] if argv is None else argv)
    except CanopyError as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 2
    if result is not None:
        print(report.results_table([result]))
        print()
        print(report.latency_table([result]))
    return 0


def replay(
    dataset_name: str, dataset_path: str, base_url: str, model: str, **arguments: Any
) -> dict[str, Any]:
    """Replay a trace from Python; return the command's JSON result. Further arguments are the command's
    options: ``num_prompts=200, no_labels=True``. Raises ``CanopyError``. An unknown option exits as the
    command does."""
    argv = ["--dataset-name", dataset_name, "--dataset-path", str(dataset_path)]
    argv += ["--base-url", base_url, "--model", model]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is not None and value is not False:
            argv += [flag, str(value)]
    result = run(argv)
    if result is None:
        raise CanopyError(f"{dataset_name!r} is not a trace; one of: {', '.join(options.DATASETS)}")
    return result


def run(argv: Sequence[str]) -> dict[str, Any] | None:
    """Return the result of a replay; ``None`` for the original's datasets."""
    import sglang.benchmark.serving as upstream

    results: list[dict[str, Any]] = []
    original_run = upstream.run_benchmark

    def run_benchmark(args: argparse.Namespace) -> Any:
        if args.dataset_name not in options.DATASETS:
            return original_run(args)
        with replace_names(upstream, run_benchmark=original_run):
            results.append(replay_all(upstream, args))
        return results[-1]

    with replace_names(
        upstream,
        ArgumentParser=_parser_class(upstream.ArgumentParser, list(argv)),
        run_benchmark=run_benchmark,
        ASYNC_REQUEST_FUNCS={
            **upstream.ASYNC_REQUEST_FUNCS,
            "openai": upstream.async_request_openai_completions,
        },
        _BACKEND_API_PATHS={
            **upstream._BACKEND_API_PATHS,
            "openai": endpoint.DIALECTS["openai"].path,
        },
    ):
        upstream.cli_main()
    return results[0] if results else None


def _parser_class(upstream_class: type, argv: list[str]) -> type:
    """Return the benchmark's parser with Canopy's datasets and options."""

    class Parser(upstream_class):  # type: ignore[misc]
        def add_argument(self, *names: Any, **kwargs: Any) -> Any:
            if "--dataset-name" in names:
                choices = list(kwargs["choices"])
                added = [name for name in options.DATASETS if name not in choices]
                kwargs["choices"] = choices + added
            return super().add_argument(*names, **kwargs)

        def parse_args(self, *_: Any, **__: Any) -> argparse.Namespace:
            options.add_arguments(self)
            return options.parse(super().parse_args(argv))

    return Parser


if __name__ == "__main__":
    sys.exit(main())
