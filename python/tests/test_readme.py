"""The quick start of the README, as it stands there but for ports and paths."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

from conftest import WAIT, Agents, free_port

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_quick_start(agents: Agents) -> None:
    text = README.read_text()
    alloc = free_port()
    for old, new in [
        ("/run/berth", str(agents.folder)), ("7400", str(alloc)), ("7300", str(free_port())), ("127.0.0.1:9401", "127.0.0.1:0"),
        ("127.0.0.1:9402", "127.0.0.1:0"),
    ]:  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    for config in re.findall(r"```yaml\n# (.*?)\.yaml\n(.*?)```", text, re.S):
        name, body = config
        agents.run(body, name, f"{agents.folder}/{name}-0.sock", alloc)
    assert len(agents.started) == 2
    (program,) = re.findall(r"```python\n(.*?)```", text, re.S)
    code = [line for line in program.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= 21
    # Parenthesized context managers are Python 3.10's.
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=3 * WAIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{i} {n} (2, 4, {n}, 32) {42 * 2 * 4 * n * 32}" for i, n in enumerate((16, 16, 8))]
