#!/usr/bin/env bash
# From text to a trained, resumed, exported model on this machine's CPU, in about four minutes after the installation.
#
#   bash launch/demo.sh [--out DIR] [--steps N] [--torch keep|cpu|cuNNN]
#
# Nothing is downloaded but Python packages (once, into .venv). A second call goes on from what is there.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

setup=() demo=()
while [ $# -gt 0 ]; do
  case "$1" in
    --torch) setup+=(--torch "${2:-}"); shift; [ $# -eq 0 ] || shift ;;
    --torch=*) setup+=("$1"); shift ;;
    *) demo+=("$1"); shift ;;
  esac
done
bash "$here/launch/setup.sh" ${setup[@]+"${setup[@]}"}
exec "$here/.venv/bin/python" -m launch.demo ${demo[@]+"${demo[@]}"}
