"""FLOPs and bytes of each kernel against their floors: arithmetic, on any machine.

    python benchmark/kernels/floors.py [--tokens 4096,16384,65536] [--ratios 0.05,0.15,0.5]

Rows are drawn at random over one prompt. With the peaks of a data sheet (``--tflops``, ``--tbps``)
a floor is also given as time; no kernel is run.
"""

from __future__ import annotations

import argparse
import random

from canopy_kernel import floors
from canopy_kernel.floors import Cost, Heads


def table(tokens: list[int], ratios: list[float], of: Heads, block: int) -> list[dict]:
    """A row for each length and ratio: cost over floor of each way, FLOPs and bytes."""
    found = []
    for n in tokens:
        for ratio in ratios:
            draw = random.Random(n)
            rows = [sorted(draw.sample(range(n), max(1, int(n * ratio))))]
            floor = floors.attention_floor(rows, [n], of)
            ways = {
                "one head a tile (before)": floors.attention_one_head_a_tile(rows, of),
                "Triton": floors.attention_tiles(rows, [n], of),
                "decomposed": floors.attention_decomposed(rows, of, block),
            }
            found += [_row(f"attention {n} r={ratio:g}", way, c, floor) for way, c in ways.items()]
        moved = floors.rope_scatter_floor(n, of)
        found.append(
            _row(f"rope_scatter {n}", "joined (before)", floors.rope_scatter_joined(n, of), moved)
        )
        found.append(_row(f"rope_scatter {n}", "by address", moved, moved))
    return found


def _row(what: str, way: str, cost: Cost, floor: Cost) -> dict:
    return {
        "what": what,
        "way": way,
        "gflop": cost.flops / 1e9,
        "flops_over_floor": cost.flops / floor.flops,
        "mbyte": cost.bytes / 1e6,
        "bytes_over_floor": cost.bytes / floor.bytes,
        "floor": floor,
    }


def numbers(text: str, kind: type) -> list:
    return [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="4096,16384,65536")
    parser.add_argument("--ratios", default="0.05,0.15,0.5")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=64, help="rows a block of the decomposition")
    parser.add_argument("--tflops", type=float, help="peak matrix rate of a data sheet")
    parser.add_argument("--tbps", type=float, help="peak memory bandwidth of a data sheet, TB/s")
    args = parser.parse_args()
    of = Heads(args.heads, args.kv_heads, args.dim)
    print("| kernel | way | GFLOP | over floor | MB asked for | over floor | floor by roofline |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for r in table(numbers(args.tokens, int), numbers(args.ratios, float), of, args.block):
        time = ""
        if args.tflops and args.tbps:
            seconds = r["floor"].seconds(args.tflops * 1e12, args.tbps * 1e12)
            time = f"{seconds * 1e6:.1f} us"
        print(
            f"| {r['what']} | {r['way']} | {r['gflop']:.2f} | {r['flops_over_floor']:.2f} |"
            f" {r['mbyte']:.1f} | {r['bytes_over_floor']:.2f} | {time} |"
        )


if __name__ == "__main__":
    main()
