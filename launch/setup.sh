#!/usr/bin/env bash
# Make .venv with everything that requirements.txt pins, once; later calls return at once.
#
#   bash launch/setup.sh [--torch keep|cpu|cu126|cu130|...]
#
#   keep   use the torch that $PYTHON imports, untouched (the default where one imports: a cluster image)
#   cpu    the CPU build (the default without an NVIDIA driver)
#   cuNNN  the build for that CUDA version (the default with a driver: the newest that it can run)
#
# PYTHON names the interpreter (default: python3). A second call at the same time waits for the first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
torch=
while [ $# -gt 0 ]; do
  case "$1" in
    --torch) [ $# -gt 1 ] || { echo "error: --torch needs a value: keep, cpu or cuNNN" >&2; exit 2; }; torch=$2; shift 2 ;;
    --torch=*) torch=${1#*=}; shift ;;
    *) echo "error: unknown option $1; usage: bash launch/setup.sh [--torch keep|cpu|cuNNN]" >&2; exit 2 ;;
  esac
done
case "$torch" in "" | keep | cpu | cu[0-9]*) ;; *) echo "error: --torch $torch is not keep, cpu or cuNNN" >&2; exit 2 ;; esac

# The stamp holds what the environment was made from; cksum is everywhere, sha256sum is not.
wanted="$(cat requirements.txt pyproject.toml launch/setup.sh | cksum)"
done_with() { [ -f .venv/setup_complete ] && [ "$(head -n 1 .venv/setup_complete)" = "$wanted" ]; }
if [ -z "$torch" ] && done_with; then exit 0; fi

command -v "$python" >/dev/null || { echo "error: $python not found; install Python 3.11 or newer, or name one: PYTHON=... $0" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "error: $("$python" --version 2>&1) is too old; Python 3.11 or newer is needed: PYTHON=python3.12 bash $0" >&2; exit 2; }

# A lock that ends with this shell, without flock(1), which macOS lacks: it belongs to descriptor 9.
exec 9>.setup.lock
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
  echo "setup: another setup is at work here; waiting for it"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}
if [ -z "$torch" ] && done_with; then exit 0; fi

pin=$(sed -n 's/^torch==//p' requirements.txt)
if [ -z "$torch" ]; then
  if "$python" -c 'import torch' 2>/dev/null; then
    torch=keep why="$python imports one"
  elif driver=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\)\.\([0-9]*\).*/\1 \2/p') && [ -n "$driver" ]; then
    read -r major minor <<<"$driver"
    if [ "$major" -ge 13 ]; then torch=cu130; elif [ "$major" -eq 12 ] && [ "$minor" -ge 6 ]; then torch=cu126; else torch=cpu; fi
    why="the NVIDIA driver runs CUDA up to $major.$minor"
    [ "$torch" = cpu ] && why="$why, too old for any CUDA build of torch $pin; update it to train on the GPU"
  else
    torch=cpu why="no torch is installed and no NVIDIA driver answers"
  fi
else
  why="--torch $torch"
fi
echo "setup: .venv with torch $([ "$torch" = keep ] && echo "kept as it is" || echo "$pin ($torch)"): $why"; echo "setup: installing requirements.txt; this takes a few minutes, once"

options=(--disable-pip-version-check --quiet)
requirements=$(mktemp); trap 'rm -f "$requirements"' EXIT
if [ "$torch" = keep ]; then
  version=$("$python" -c 'import torch; print(torch.__version__)') || { echo "error: --torch keep: $python imports no torch" >&2; exit 2; }
  "$python" -m venv --clear --system-site-packages .venv
  # A torch in a virtual environment of its own is out of --system-site-packages' reach: point at its folder.
  "$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
    >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kept_torch.pth"
  grep -v '^torch==' requirements.txt >"$requirements"
  echo "torch===$version" >"$requirements.constraint"
  options+=(--constraint "$requirements.constraint")
  trap 'rm -f "$requirements" "$requirements.constraint"' EXIT
else
  "$python" -m venv --clear .venv
  cp requirements.txt "$requirements"
  # A wheel that pip is configured to find on this machine comes first; the index is asked otherwise.
  if [ "$(uname -s)" = Linux ] && ! .venv/bin/python -m pip download "${options[@]}" --no-index --no-deps --dest "$(mktemp -d)" "torch==$pin+$torch" >/dev/null 2>&1; then
    options+=(--extra-index-url "https://download.pytorch.org/whl/$torch")
    sed -i "s/^torch==.*/torch==$pin+$torch/" "$requirements"
  fi
fi
.venv/bin/python -m pip install "${options[@]}" --requirement "$requirements"
printf '%s\n%s\n' "$wanted" "torch: $torch" >.venv/setup_complete
echo "setup: done in ${SECONDS} s"
