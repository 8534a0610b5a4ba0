#!/usr/bin/env bash
# In the vLLM environment DIR, with the connector from the wheel in dist/: run tests, or a script of tests/vllm.
#   run-vllm.sh DIR [pytest arguments]
#   run-vllm.sh DIR demo.py|cost.py [arguments]
set -euo pipefail
dir=$1; shift
cd "$(dirname "$0")/.."
site=$(cd .. && pwd)/dist/vllm-site tools=$(cd .. && pwd)/dist/vllm-tools
stamp=$site/.$(cat ../dist/berth_kv-*.whl | sha256sum | cut -c1-32)
if [ ! -e "$stamp" ]; then
  rm -rf "$site"
  "$dir/bin/python" -m pip install -q --disable-pip-version-check --no-deps --target "$site" ../dist/berth_kv-*.whl
  touch "$stamp"
fi
export KV_TEST_VLLM=$dir KV_TEST_SITE=$site OMP_NUM_THREADS=1
case ${1:-} in *.py)
  script=tests/vllm/$1
  if [ -e "$script" ] && [[ $1 != test_* ]]; then shift; exec "$dir/bin/python" "$script" "$@"; fi ;;
esac
[ -d "$tools" ] || "$dir/bin/python" -m pip install -q --disable-pip-version-check --target "$tools" pytest==9.0.2
export PYTHONPATH=$site:$tools
exec "$dir/bin/python" -m pytest -p no:cacheprovider -q -W ignore "${@:-tests/vllm}"
