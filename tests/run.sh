#!/usr/bin/env bash
# Set up .venv if needed, then lint and test.
#
#   bash tests/run.sh                  everything
#   bash tests/run.sh -m "not slow"    under two minutes: nothing that starts ranks
#   bash tests/run.sh PYTEST_ARGUMENTS
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check --quiet .
exec .venv/bin/python -m pytest "$@"
