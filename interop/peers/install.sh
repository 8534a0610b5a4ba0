#!/usr/bin/env bash
# Make a Python environment with LMCache's PD backend and NIXL in it, which run without a GPU (2-3 min, 6.7 GB). A second run does nothing.
#   install.sh DIR
set -euo pipefail
dir=$1 stamp=$1/.berth-lmcache-1
[ -e "$stamp" ] && exit 0
die() { echo "interop: $*" >&2; exit 1; }
command -v python3 >/dev/null || die "python3 is missing: the real LMCache peers need Python 3.10 or later"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "Python 3.10 or later is needed; this is $(python3 --version)"
[ -x "$dir/bin/python" ] || { mkdir -p "$(dirname "$dir")"; python3 -m venv "$dir" || die "python3 -m venv failed: install python3-venv"; }
echo "interop: installing LMCache and NIXL into $dir (2-3 min, 6.7 GB, once)" >&2
pip() { "$dir/bin/pip" install -q --disable-pip-version-check "$@" || die "pip could not install $*: is there network access to a package index?"; }
pip lmcache==0.5.6
# The umbrella package picks nixl_cu12 or nixl_cu13 by torch's CUDA version; both run on a machine without a GPU.
pip --no-deps nixl==1.5.1 nixl-cu12==1.5.1 nixl-cu13==1.5.1
touch "$stamp"
