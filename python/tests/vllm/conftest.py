"""These tests run in vLLM's environment: `make vllm`."""

from __future__ import annotations

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

pytest_plugins = ["rig"]
