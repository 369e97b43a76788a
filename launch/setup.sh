#!/usr/bin/env bash
# Make .venv with everything that requirements.txt pins, once; later calls return at once.
#
#   bash launch/setup.sh [--torch keep|cpu|cu126|cu130|...]
#
#   keep   use the torch that $PYTHON imports, untouched (the default where a suitable one imports: a cluster image)
#   cpu    the CPU build (the default without an NVIDIA driver)
#   cuNNN  the build for that CUDA version (the default with a driver: chosen by the CUDA version that it reports)
#
# PYTHON names the interpreter that .venv is made from (default: python3). A second call at the same time waits.
set -euo pipefail
start=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $1" >&2; exit 2; }
asked=
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | grep -v '^set'; exit 0 ;;
    --torch) [ $# -gt 1 ] || fail "--torch needs a value: keep, cpu or cuNNN"; asked=$2; shift 2 ;;
    --torch=*) asked=${1#*=}; shift ;;
    *) fail "unknown option $1; usage: bash launch/setup.sh [--torch keep|cpu|cuNNN]" ;;
  esac
  [[ $asked =~ ^(keep|cpu|cu[0-9]{3})$ ]] || fail "--torch $asked is not keep, cpu or cuNNN"
done

# The stamp says what .venv was made from; cksum is everywhere, sha256sum is not.
wanted="$(cat requirements.txt pyproject.toml launch/setup.sh | cksum)"
ready() {
  [ -f .venv/setup_complete ] && [ "$(sed -n 1p .venv/setup_complete)" = "$wanted" ] &&
    { [ -z "$asked" ] || [ "$(sed -n 2p .venv/setup_complete)" = "torch: $asked" ]; }
}
if ready; then exit 0; fi

python=${PYTHON:-python3}
case "$python" in /*) ;; */*) python=$start/$python ;; esac
command -v "$python" >/dev/null || fail "$python not found; install Python 3.11 or newer, or name one: PYTHON=/path/to/python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$python is not Python 3.11 or newer; name one: PYTHON=/path/to/python3.12"
# Called with .venv active, python3 is the one that is about to be replaced: go on with what that was made from.
python=$("$python" -c 'import os, sys; print(sys._base_executable if os.path.realpath(sys.prefix) == os.path.realpath(".venv") else sys.executable)')
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python can't make virtual environments; on Debian and Ubuntu: apt install python3-venv"

# A lock that ends with this shell, without flock(1), which macOS lacks: it belongs to descriptor 9.
exec 9>.setup.lock
if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
  echo "setup: another setup is at work here; waiting for it"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
  if ready; then exit 0; fi
fi

pin=$(sed -n 's/^torch==//p' requirements.txt)
range=$(sed -n 's/^ *"torch\(.*\)",$/\1/p' pyproject.toml)
# The torch that $python imports, and whether it lies in the range; numbers alone, as images carry 2.11.0a0+local.
found=$("$python" - "$range" <<'PYTHON' 2>/dev/null || true
import re, sys
import torch
numbers = lambda text: tuple(int(n) for n in re.findall(r"\d+", text)[:2])
low, high = (numbers(bound) for bound in sys.argv[1].split(","))
print(torch.__version__, low <= numbers(torch.__version__) < high)
PYTHON
)
torch=$asked why="--torch $asked"
if [ "$asked" = keep ]; then
  [ -n "$found" ] || fail "--torch keep: $python imports no torch"
  [ "${found#* }" = True ] || fail "--torch keep: the torch ${found% *} of $python is outside $range; leave --torch out to install $pin"
elif [ -z "$asked" ] && [ "${found#* }" = True ]; then
  torch=keep why="$python imports torch ${found% *}"
elif [ -z "$asked" ]; then
  old=; [ -z "$found" ] || old=" (the torch ${found% *} of $python is outside $range)"
  if ! smi=$(nvidia-smi 2>/dev/null); then
    torch=cpu why="no NVIDIA driver answers$old"
  else
    # Newer drivers print "CUDA UMD Version".
    driver=$(sed -nE 's/.*CUDA (UMD )?Version: *([0-9]+)\.([0-9]+).*/\2 \3/p' <<<"$smi" | head -n 1)
    read -r major minor <<<"$driver" || true
    if [ -z "$driver" ]; then
      fail "nvidia-smi answers but names no CUDA version; say which build to take: --torch cu126, cu130 or cpu"
    elif [ "$major" -ge 13 ]; then
      torch=cu130
    elif [ "$major" -eq 12 ] && [ "$minor" -ge 6 ]; then
      torch=cu126
    else
      fail "the NVIDIA driver runs CUDA up to $major.$minor, torch $pin is built for 12.6 and newer: update it, or pass --torch cu126 or cpu"
    fi
    why="the NVIDIA driver runs CUDA up to $major.$minor$old"
  fi
fi
if [ "$torch" = keep ]; then what="kept as it is"; else what="$pin ($torch)"; fi
echo "setup: .venv with torch $what: $why"
echo "setup: installing requirements.txt; this takes a few minutes, once"

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
options=(--disable-pip-version-check --quiet)
requirements=requirements.txt
rm -f .venv/setup_complete
if [ "$torch" = keep ]; then
  requirements=$work/requirements.txt
  grep -v '^torch==' requirements.txt >"$requirements"
  echo "torch===${found% *}" >"$work/constraints.txt"
  options+=(--constraint "$work/constraints.txt")
  "$python" -m venv --clear --system-site-packages .venv
  # A torch in a virtual environment of its own is out of --system-site-packages' reach: point at its folder.
  "$python" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
    >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kept_torch.pth"
else
  "$python" -m venv --clear .venv
  # A wheel that pip is configured to find on this machine comes first; else the index of that build.
  if [ "$(uname -s)" = Linux ] && ! .venv/bin/python -m pip download "${options[@]}" --no-index --no-deps --dest "$work" \
    "torch==$pin+$torch" >/dev/null 2>&1; then
    options+=(--extra-index-url "https://download.pytorch.org/whl/$torch")
    requirements=$work/requirements.txt
    sed "s/^torch==.*/torch==$pin+$torch/" requirements.txt >"$requirements"
  fi
fi
.venv/bin/python -m pip install "${options[@]}" --requirement "$requirements"
printf '%s\ntorch: %s\n' "$wanted" "$torch" >.venv/setup_complete
echo "setup: done in ${SECONDS} s"
