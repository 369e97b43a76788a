#!/usr/bin/env bash
# Check a run, then start it on this machine.
#
#   bash launch/local.sh NAME[.HARDWARE] [--dry_run] [options] [KEY=VALUE ...]      options: --help
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# This copy of the repository, wherever the installed one is; -P: not a folder named launch in the working directory.
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
[ -x "$here/.venv/bin/python" ] || { echo "error: $here/.venv is not there yet: bash $here/launch/setup.sh makes it" >&2; exit 2; }
exec "$here/.venv/bin/python" -P -m launch.start local "$@"
