# Sourced by the scripts beside it: sets PYTHON to a Python 3.11, or says so and exits.
# The pinned packages are verified on 3.11; PYTHON=/path/to/python3.11 chooses one.

is_311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

if [ -n "${PYTHON:-}" ]; then
  if ! is_311 "$PYTHON"; then
    echo "canopy: PYTHON=$PYTHON is not a Python 3.11: $("$PYTHON" --version 2>&1 | head -n 1)" >&2
    exit 2
  fi
else
  for candidate in python3.11 python3 python; do
    if is_311 "$candidate"; then
      PYTHON=$candidate
      break
    fi
  done
  if [ -z "${PYTHON:-}" ]; then
    echo "canopy: needs Python 3.11 (python3 is: $(python3 --version 2>&1 | head -n 1)); install it, or name it with PYTHON=/path/to/python3.11" >&2
    exit 2
  fi
fi
