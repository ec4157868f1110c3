#!/usr/bin/env bash
# From a fresh clone to a running server that has compared two policies: ./scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/python.sh
exec "$PYTHON" scripts/quickstart.py "$@"
