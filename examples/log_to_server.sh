#!/usr/bin/env bash
# From a log of requests to advice, to a plan, to a server that follows the plan:
#
#     examples/log_to_server.sh LOG MODEL [options of sglang serve]
#
# PLAN holds options of `canopy plan`: what you promise, your prices, your engine's measured costs.
set -euo pipefail
log=$1 model=$2
shift 2

canopy advise "$log" --out advice.html
# shellcheck disable=SC2086
canopy plan "$log" ${PLAN:---slo p99_ttft<2s} --html plan.html --out plan.yaml
exec sglang serve --model-path "$model" --config plan.yaml "$@"
