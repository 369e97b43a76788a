#!/usr/bin/env bash
# From text to a trained, resumed, exported model on this machine's CPU, in about four minutes after the installation.
#
#   bash launch/demo.sh [--out DIR] [--steps N] [--torch keep|cpu|cuNNN]
#
#   --out DIR   where everything it makes goes (default: demo/ in this repository)
#   --steps N   optimizer steps (default: the recipe's)
#   --torch     which torch launch/setup.sh installs
#
# Nothing is downloaded but Python packages (once, into .venv). A second call goes on from what is there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

setup=() demo=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --torch | --out | --steps)
      [ $# -gt 1 ] && [ -n "$2" ] || { echo "error: $1 needs a value; see --help" >&2; exit 2; }
      if [ "$1" = --torch ]; then setup+=("$1" "$2"); else demo+=("$1" "$2"); fi
      shift 2 ;;
    --torch=?*) setup+=("$1"); shift ;;
    --out=?* | --steps=?*) demo+=("$1"); shift ;;
    *) echo "error: unknown option $1; see --help" >&2; exit 2 ;;
  esac
done
bash "$here/launch/setup.sh" ${setup[@]+"${setup[@]}"}
# -P: a folder named launch in the working directory must not come first.
exec "$here/.venv/bin/python" -P -m launch.demo ${demo[@]+"${demo[@]}"}
