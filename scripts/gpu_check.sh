#!/usr/bin/env bash
# Every kernel and the fused prefill on a GPU, in minutes: ./scripts/gpu_check.sh [OUT_FOLDER] [--quick]
# Needs torch with CUDA and Triton; FlashInfer and FA3 are compared where they are.
# Without a GPU: --dry-run does the report's arithmetic, --smoke runs everything tiny, interpreted.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="out/gpu_check"
if [[ $# -gt 0 && $1 != --* ]]; then out=$1; shift; fi
mkdir -p "$out"
export PYTHONPATH="python:sgl-kernel/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TRITON_INTERPRET=0
compile=1
case " $* " in
  *" --dry-run "*) compile=0 ;;
  *" --smoke "*) compile=0; export TRITON_INTERPRET=1 ;;
esac
python3 benchmark/kernels/gpu_check.py --json "$out/gpu_check.json" "$@" 2>&1 | tee "$out/gpu_check.txt"
checked=${PIPESTATUS[0]} compiled=0
if ((compile)); then # last: a check compiles what it runs
  limit=${COMPILE_SECONDS:-300}
  timeout -k 5 "$limit" python3 -m canopy_kernel.compile --here --json "$out/compile.json" \
    >"$out/compile.txt" 2>&1
  compiled=$?
  tail -n 1 "$out/compile.txt"
  if ((compiled == 124)); then
    echo "not all were compiled in $limit s (COMPILE_SECONDS)"
    compiled=0
  fi
fi
exit $((compiled > checked ? compiled : checked))
