#!/usr/bin/env bash
# Serve the bundle's random 8B Llama on a GPU machine without a network: ./serve.sh [flags of launch_server]
# EVICTION: the policy (wa); GRAPHS: how decoding is captured (disabled).
# Wants Python 3.12, torch 2.11 with CUDA, Triton 3.6 and transformers 5.17 in PYTHON (python3), and
# what is named below. On a CPU: SGLANG_USE_CPU_ENGINE=1 ./serve.sh --device cpu --attention-backend
# torch_native --json-model-override-args '{"num_hidden_layers": 2}' (the 8B takes 16 GB).
set -euo pipefail
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3} site=${SITE:-$bundle/site}
if [[ ! -e $site/.installed ]]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$site" "$bundle"/wheels/*.whl
  touch "$site/.installed"
fi
# Too large for the bundle, or part of any machine with torch: without them SGLang's own message
# would be that it does not know Canopy's flags.
wanted=(torch torchvision triton transformers numpy scipy PIL psutil xxhash requests aiohttp \
  prometheus_client uvloop einops sentencepiece tiktoken tqdm jinja2)
missing=$("$python" -c 'import importlib.util as u, sys
print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])' "${wanted[@]}")
if [[ -n $missing ]]; then
  echo "$python has no $missing: the bundle leaves out what the machine is to have; install them" >&2
  exit 2
fi
export PYTHONPATH="$site:$bundle/stand_in${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 SGLANG_IS_FLASHINFER_AVAILABLE=false
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
export SGLANG_JIT_CACHE_DIR=${SGLANG_JIT_CACHE_DIR:-$bundle/jit}
if nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null); then
  nvcc=$(readlink -f "$nvcc")
  export PATH="$(dirname "$nvcc"):$PATH" CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$nvcc")")}
  # The just-in-time kernels link against libcudart.so; torch's wheel has it under its version only.
  runtime=$("$python" -c 'import glob, site
found = [f for s in site.getsitepackages() for f in glob.glob(s + "/nvidia/**/libcudart.so.*", recursive=True)]
print(found[0] if found else "")')
  if [[ -n $runtime ]]; then
    mkdir -p "$bundle/lib" && ln -sf "$runtime" "$bundle/lib/libcudart.so"
    export LIBRARY_PATH="$bundle/lib${LIBRARY_PATH:+:$LIBRARY_PATH}"
  fi
else
  echo "no nvcc: SGLang's fused operators run in torch; leave host tiers off" >&2
  export SGLANG_FORCE_FUSED_OP_BACKEND=torch
fi
exec "$python" -m sglang.launch_server --model-path "$bundle/model" --load-format dummy \
  --dtype bfloat16 --attention-backend triton --sampling-backend pytorch \
  --cuda-graph-backend-prefill disabled --cuda-graph-backend-decode "${GRAPHS:-disabled}" \
  --radix-eviction "${EVICTION:-wa}" --page-size 16 --enable-metrics --enable-cache-report "$@"
