#!/usr/bin/env bash
# Install the wheel in dist/ into an environment of its own there, and run the tests that need no vLLM against bin/berth.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=../dist/venv
[ -x $venv/bin/python ] || python3 -m venv $venv
$venv/bin/python -m pip install -q --disable-pip-version-check -r tests/requirements.txt
$venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --force-reinstall ../dist/berth_kv-*.whl
$venv/bin/python -m pip install -q --disable-pip-version-check ../dist/berth_kv-*.whl # what it needs
$venv/bin/python -m mypy --cache-dir ../dist/mypy
exec $venv/bin/python -m pytest -p no:cacheprovider -q --ignore tests/vllm "$@" tests
