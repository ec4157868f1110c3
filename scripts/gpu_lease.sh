#!/usr/bin/env bash
# What thirty minutes with one GPU are for, in three commands of at most ten minutes each:
#   ./scripts/gpu_lease.sh one      the chip, kernels right and fast, their tests
#   ./scripts/gpu_lease.sh two      a served 1B: answers, arms beside each other, documents exact
#   ./scripts/gpu_lease.sh three    a served 8B: documents beside SGLang's own prefill
# Before, where there is a network: ./scripts/gpu_bundle.sh .lease/bundle. On the machine each command
# wants the checkout with .lease in it; what comes back is in $OUT: a summary and the logs.
# Each part has its own limit and its own log, and one that fails costs only itself. LEASE_SKIP="a b"
# leaves parts out. DRY=1 runs nothing and checks everything: programs, flags, files of tests.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
call=${1:-} python=${PYTHON:-python3} programs=scripts/gpu_lease
bundle=${BUNDLE:-$PWD/.lease/bundle} work=${WORK:-/tmp/lease} out=${OUT:-/tmp/lease_out}
skip=" ${LEASE_SKIP:-} " began=$(date +%s) server=0
ends=$((began + ${LEASE_SECONDS:-565}))
export PORT=${PORT:-30000} SITE=${SITE:-/tmp/site} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export SGLANG_JIT_CACHE_DIR=/tmp/jit TRITON_CACHE_DIR=/tmp/triton
kernels=$PWD/python:$PWD/sgl-kernel/python
summary=$work/summary-$call.txt

say() { echo "[$(($(date +%s) - began)) s] $*" | tee -a "$summary"; }

pack() { # after every part, since a command may be stopped at its limit
  [[ -z ${DRY:-} ]] || return 0
  cp "$summary" "$out/"
  tar -C "$work" -czf "$out/logs-$call.tgz" logs results 2>/dev/null || true
}

left() { echo $((ends - $(date +%s) - $1)); }

part() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 before rc
  shift 2
  if [[ $skip == *" $name "* ]]; then say "$name: left out"; return 0; fi
  if [[ -n ${DRY:-} ]]; then record part "$name" "$@"; return "${fails:-0}"; fi
  before=$(date +%s)
  if ((limit > $(left 8))); then limit=$(left 8); fi
  if ((limit < 3)); then say "$name: NOT RUN, the call's time is up"; return 1; fi
  timeout -k 5 "$limit" "$@" >"$work/logs/$name.log" 2>&1
  rc=$?
  case $rc in
    0) say "$name: ok in $(($(date +%s) - before)) s" ;;
    124 | 137) say "$name: STOPPED after its $limit s" ;;
    *) say "$name: FAILED with $rc in $(($(date +%s) - before)) s" ;;
  esac
  grep -a '^RESULT ' "$work/logs/$name.log" | cut -c8- | tee -a "$summary"
  [[ $rc == 0 ]] || tail -n 12 "$work/logs/$name.log" | sed 's/^/    /' | tee -a "$summary"
  pack
  return $rc
}

serve() { # NAME SECONDS FLAGS...: 0 when it answers. EVICTION and GRAPHS are serve.sh's, or its defaults
  local name=$1 limit=$2 i
  shift 2
  local line=(env "EVICTION=${EVICTION:-}" "GRAPHS=${GRAPHS:-}"
    bash "$bundle/serve.sh" --port "$PORT" --host 127.0.0.1 "$@")
  if [[ -n ${DRY:-} ]]; then record serve "$name" "${line[@]}"; return "${fails:-0}"; fi
  stop_server
  if ((limit > $(left 30))); then limit=$(left 30); fi
  if ((limit < 15)); then say "server $name: NOT STARTED, the call's time is up"; return 1; fi
  setsid "${line[@]}" >"$work/logs/$name.server.log" 2>&1 &
  server=$!
  for ((i = 0; i < limit; i += 2)); do
    if curl -sf -m 2 "http://127.0.0.1:$PORT/health" >/dev/null; then
      say "server $name answers after $i s"
      return 0
    fi
    kill -0 "$server" 2>/dev/null || break
    sleep 2
  done
  say "server $name did NOT start"
  grep -aE 'Error|error:|canopy' "$work/logs/$name.server.log" | tail -n 3 | cut -c1-300 | tee -a "$summary"
  stop_server
  return 1
}

stop_server() { # the main process ends the others; then its process group
  [[ $server == 0 ]] && return 0
  kill -TERM "$server" 2>/dev/null
  for _ in 1 2 3 4 5 6; do
    kill -0 -- "-$server" 2>/dev/null || break
    sleep 1
  done
  kill -KILL -- "-$server" 2>/dev/null
  server=0
}

record() { # a command that a dry run would run, its words apart by a unit separator
  local IFS=$'\x1f'
  echo "$*" >>"$work/commands"
}

kernel_python() { # NAME SECONDS WORDS...: Python that sees the kernels and no SGLang
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" env PYTHONPATH="$kernels" TRITON_INTERPRET=0 "$python" "$@"
}

checked_python() { # NAME SECONDS WORDS...: as the tests want it, SGLang beside the kernels
  local name=$1 limit=$2
  shift 2
  part "$name" "$limit" env PYTHONPATH="$kernels:$SITE:$bundle/stand_in" \
    SGLANG_IS_FLASHINFER_AVAILABLE=false "$python" "$@"
}

one() {
  local check=benchmark/kernels/gpu_check.py
  kernel_python facts 60 $programs/facts.py
  part install 90 "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
    --upgrade --target "$SITE" "$bundle"/wheels/*.whl \
    && [[ -z ${DRY:-} ]] && touch "$SITE/.installed"
  kernel_python right 110 $check --quick --only correctness --json "$work/results/right.json"
  kernel_python attention 80 $check --quick --only attention --json "$work/results/attention.json"
  kernel_python ways 10 $programs/ways.py "$work/results/attention.json" "$work/results/ways.json"
  kernel_python movers 50 $check --quick --only movers index --json "$work/results/movers.json"
  kernel_python stages 70 $programs/stages.py
  kernel_python pinned 30 $programs/pinned.py
  checked_python waits 60 -m pytest -q -p no:cacheprovider test/chunk/server/test_no_host_waits.py
  checked_python tests 90 -m pytest -q -p no:cacheprovider \
    test/kernels/test_kernels_match_references.py test/kernels/test_attention_decomposition.py
  kernel_python empty_block 40 $programs/empty_block.py
}

answers_and_load() { # ARM
  part "same_$1" 50 "$python" $programs/same.py
  part "churn_$1" 50 "$python" $programs/churn.py 300
  stop_server
}

two() { # the first server compiles SGLang's own kernels: one to three minutes
  local model=(--model-path "$work/model_1b" --load-format auto --mem-fraction-static 0.5)
  local small=("${model[@]}" --max-total-tokens 60000 --cuda-graph-max-bs-decode 16)
  local tiers=(--page-size 64 --enable-hierarchical-cache --hicache-size 8)
  local documents=("${model[@]}" --page-size 64 --canopy-chunks on,memory_mb=3000)
  kernel_python model_1b 60 $programs/random_model.py "$work/model_1b" "$bundle/model" --size 1b
  if EVICTION=wa GRAPHS=full serve wa 240 "${small[@]}" --page-size 64 \
    || EVICTION=wa GRAPHS=disabled serve wa_eager 120 "${small[@]}" --page-size 64; then
    answers_and_load wa
  fi
  if EVICTION=lru GRAPHS=full serve lru 90 "${small[@]}" --page-size 64; then
    answers_and_load lru # what plain serving answers twice
  fi
  if serve documents 90 "${documents[@]}" --cuda-graph-backend-prefill breakable \
    --cuda-graph-bs-prefill 128 256 512 1024 2048 \
    || serve documents_eager 80 "${documents[@]}"; then
    part documents_exact 80 "$python" $programs/documents.py exact 3000
    stop_server
  fi
  for arm in auto lru; do # the same pool, host tier and requests; auto writes back
    if EVICTION=$arm GRAPHS=full serve "host_$arm" 70 "${small[@]}" "${tiers[@]}"; then
      answers_and_load "host_$arm"
    fi
  done
}

three() {
  local weights=(--model-path "$work/model_8b" --load-format auto)
  kernel_python model_8b 90 $programs/random_model.py "$work/model_8b" "$bundle/model" --size 8b \
    || weights=(--model-path "$bundle/model" --load-format dummy)
  local big=("${weights[@]}" --mem-fraction-static 0.75 --cuda-graph-max-bs-decode 16
    --chunked-prefill-size 16384 --context-length 32768 --page-size 64
    --canopy-chunks on,memory_mb=8192)
  if GRAPHS=full serve speed 180 "${big[@]}" --cuda-graph-backend-prefill breakable \
    --cuda-graph-bs-prefill 512 1024 2048 --warmups canopy_chunks \
    || GRAPHS=disabled serve speed_eager 140 "${big[@]}"; then
    part documents_speed 130 "$python" $programs/documents.py speed 15000
    stop_server
  fi
  local arms=("${weights[@]}" --mem-fraction-static 0.75 --cuda-graph-max-bs-decode 16
    --page-size 64 --max-total-tokens 60000)
  for arm in wa lru auto; do # the same pool and the same requests
    if EVICTION=$arm GRAPHS=full serve "8b_$arm" 70 "${arms[@]}"; then
      part "churn_8b_$arm" 50 "$python" $programs/churn.py 300
      stop_server
    fi
  done
}

if [[ -n ${DRY:-} ]]; then
  work=$(mktemp -d) summary=/dev/null
  trap 'rm -r "$work"' EXIT
  bundle=$PWD/scripts/gpu_bundle
  for fails in 0 1; do one; two; three; done # 1: what has a second way takes it
  "$python" $programs/check.py "$work/commands"
  exit
fi
case $call in one | two | three) ;; *)
  echo "usage: $0 one|two|three (or DRY=1 $0)" >&2
  exit 2
  ;;
esac
mkdir -p "$work/logs" "$work/results" "$out"
: >"$summary"
trap 'stop_server; pack' EXIT
"$call"
say "call $call is over"
