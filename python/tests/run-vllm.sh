#!/usr/bin/env bash
# Run tests in the vLLM environment DIR, with the connector from the wheel in dist/.
#   run-vllm.sh DIR [pytest arguments]
set -euo pipefail
dir=$1; shift
cd "$(dirname "$0")/.."
site=$(cd .. && pwd)/dist/vllm-site tools=$(cd .. && pwd)/dist/vllm-tools
rm -rf "$site"
"$dir/bin/python" -m pip install -q --disable-pip-version-check --no-deps --target "$site" ../dist/berth_kv-*.whl
[ -d "$tools" ] || "$dir/bin/python" -m pip install -q --disable-pip-version-check --target "$tools" pytest==9.0.2
export KV_TEST_VLLM=$dir KV_TEST_SITE=$site PYTHONPATH=$site:$tools OMP_NUM_THREADS=1
exec "$dir/bin/python" -m pytest -p no:cacheprovider -q -W ignore "${@:-tests/vllm}"
