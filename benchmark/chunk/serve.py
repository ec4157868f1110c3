"""Chunk reuse in a real server: time to first token, request rate, exactness, baselines.

    python benchmark/chunk/serve.py ttft  --model DIR --data DATA --lengths 2048,4096,7168
    python benchmark/chunk/serve.py first --model DIR --data DATA --tokens 2048 --repeats 6
    python benchmark/chunk/serve.py load  --model DIR --data DATA --tokens 2048 --rates 0.2,0.4,0.8
    python benchmark/chunk/serve.py exact --model DIR --data DATA --tokens 400 --prompts 100
    python benchmark/chunk/serve.py turns --model DIR --data DATA --lengths 1024,2048,4096 --repeats 3

Both sides of `ttft`, `first` and `load` are requests to one server: a request either names its
documents or has ``"off"``, which is SGLang's own prefix cache. Orders are shuffled, so a prefix
hit is the system text and now and then a first document.
"""

from __future__ import annotations

import argparse

import rag_server
import serve_exact
import serve_load
import serve_ttft
import serve_turns

COMMANDS = {
    "ttft": serve_ttft.ttft,
    "first": serve_ttft.first_use,
    "load": serve_load.load,
    "exact": serve_exact.exact,
    "turns": serve_turns.turns,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("what", choices=tuple(COMMANDS))
    rag_server.add_arguments(parser)
    add("--lengths", default="2048,4096,7168", help="prompt tokens (ttft, turns)")
    add("--tokens", type=int, default=2048, help="prompt tokens (first, load, exact)")
    add(
        "--repeats",
        type=int,
        default=5,
        help="pairs of requests (ttft, first), of conversations (turns)",
    )
    add("--rates", default="0.1,0.2,0.4,0.8", help="requests a second (load)")
    add("--reuse-rates", default=None, help="other rates for the side with reuse (load)")
    add("--side", choices=("both", "prefix", "reuse"), default="both", help="who is loaded")
    add("--seconds", type=float, default=60, help="of arrivals a rate (load)")
    add("--target", type=float, default=None, help="TTFT target in s (load)")
    add("--prompts", type=int, default=100, help="prompts (exact)")
    add("--others", default="no flag,no Canopy", help="servers beside the first (exact)")
    add("--new-tokens", type=int, default=8, help="tokens of an answer (exact)")
    args = parser.parse_args()
    from transformers import AutoTokenizer

    COMMANDS[args.what](AutoTokenizer.from_pretrained(args.model), args)


if __name__ == "__main__":
    main()
