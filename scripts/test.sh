#!/usr/bin/env bash
# Lint, types and tests, in the environment the quick start makes: ./scripts/test.sh [--all] [pytest flags]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/python.sh
exec "$PYTHON" scripts/run_tests.py "$@"
