#!/usr/bin/env bash
# Orders of the queue on real servers, in turns: SGLang's own, ours, and the first arm twice as the
# placebo. Slices of 200 requests, so that queues grow. Six servers of 2.5 GB each; hours on two cores.
#     benchmark/latency/served_order.sh DATA MODEL OUT
set -euo pipefail
[ $# -eq 3 ] || { sed -n 2,4p "$0"; exit 2; }
OMP_NUM_THREADS=1 exec python "$(dirname "$0")/served.py" --data "$1" --model "$2" --out "$3" \
    --name served-order --trace conversation --loads 0.8,0.95,1.1 --slices 6 --slice-requests 200 \
    --common="--chunked-prefill-size 128" \
    --arm "fcfs=--radix-eviction wa" \
    --arm "placebo=--radix-eviction wa" \
    --arm "hrrn=--radix-eviction wa --schedule-policy hrrn" \
    --arm "shortest=--radix-eviction wa --schedule-policy shortest-prefill-first" \
    --arm "ours=--radix-eviction wa --canopy-queue-order bounded-shortest" \
    --arm "twice=--radix-eviction wa --canopy-queue-order bounded-shortest --canopy-max-wait-factor 2"
