#!/usr/bin/env bash
# Runs the tests on the CPU: bash scripts/test.sh [pytest arguments]
source "$(dirname "$0")/environment.sh" test
JAX_PLATFORMS=cpu "$PYTHON" -m pytest -n auto "$@"
