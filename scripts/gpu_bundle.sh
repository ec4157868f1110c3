#!/usr/bin/env bash
# A folder of at most 52 MiB with which a GPU machine without a network serves a random 8B Llama:
#   ./scripts/gpu_bundle.sh OUT_FOLDER [TOKENIZER_FOLDER]     then there: OUT_FOLDER/serve.sh
# The machine has Python 3.12, torch 2.11 with CUDA, Triton 3.6 and transformers; the folder brings
# the other wheels (SGLang's without what a text server does not load), this project, and stand-ins.
# With the checkout, which travels too (11 MiB), it stays below 64 MiB. What to run: gpu_lease.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -lt 1 ]]; then echo "usage: $0 OUT_FOLDER [TOKENIZER_FOLDER]" >&2; exit 2; fi
out=$1 tokenizer=${2:-.canopy/models/smollm2-135m-instruct} limit_mib=52 python=${PYTHON:-python3}
if [[ -e $out/wheels ]]; then echo "$out is a bundle already: name another folder" >&2; exit 2; fi
if ! compgen -G "$tokenizer/tokenizer*.json" >/dev/null; then
  echo "$tokenizer has no tokenizer*.json: name a folder that has, or run ./scripts/test.sh once" >&2
  exit 2
fi
mkdir -p "$out/wheels" "$out/model" "$out/whole"
platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
for glibc in 34 28 27 26 24 17 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 \
  --implementation cp "${platforms[@]}" -d "$out/wheels" -r requirements/gpu-bundle.txt
mv "$out"/wheels/sglang-*.whl "$out/whole/"
"$python" scripts/gpu_bundle/slim_wheel.py "$out"/whole/sglang-*.whl "$out/wheels"
rm -r "$out/whole"
mkdir "$out/source" # apart, since a build folder here may hold modules that are gone
cp -r pyproject.toml README.md LICENSE python sgl-kernel "$out/source/"
"$python" -m pip wheel -q --no-deps -w "$out/wheels" "$out/source"
rm -r "$out/source"
cp -r scripts/gpu_bundle/stand_in scripts/gpu_bundle/serve.sh "$out/"
cp scripts/gpu_bundle/llama_8b.json "$out/model/config.json"
cp "$tokenizer"/tokenizer*.json "$out/model/"
find "$out" -name __pycache__ -prune -exec rm -r {} +
mib=$(du -sm --apparent-size "$out" | cut -f1)
echo "$out: $mib MiB in $(ls "$out/wheels" | wc -l) wheels"
if ((mib > limit_mib)); then echo "more than $limit_mib MiB: too large to bring" >&2; exit 1; fi
