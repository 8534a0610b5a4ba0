"""Real agents for the tests: `bin/berth agent`, or what BERTH names, as processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from ports import free_port

import berth_kv

ROOT = pathlib.Path(__file__).parents[2]
BERTH = os.environ.get("BERTH", str(ROOT / "bin" / "berth"))
WAIT = 20.0  # seconds; how long a test waits for what must come

LAYOUT = berth_kv.Layout.attention(layers=4, kv_heads=2, head_size=16, chunk_tokens=16, dtype="bfloat16")
SHAPE = "kv_shape: [4, 2, 16, 2, 16]\nkv_dtype: bfloat16\n"


@dataclass
class Agent:
    """A process, and where it listens."""

    process: subprocess.Popen[str]
    socket: str
    alloc_port: int
    init_port: int
    log: pathlib.Path

    def status(self) -> dict[str, Any]:
        with berth_kv.connect(self.socket, part="tool") as tool:
            return tool.status()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(WAIT)
            except subprocess.TimeoutExpired:
                self.kill()


class Agents:
    """Starts agents in a folder; their pools must be empty again at the end."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.started: list[Agent] = []

    def start(self, role: str, slots: int = 8, options: str = "", shape: str = SHAPE, slot_bytes: int = LAYOUT.slot_bytes, rank: int = 0, ranks: int = 1) -> Agent:
        """An agent of that role with pools of so many slots, for one of its engine's ranks."""
        name = f"{role}-{len(self.started)}"
        path = self.folder / f"{name}.sock"
        allocs, inits = [free_port() for _ in range(ranks)], [free_port() for _ in range(ranks)]
        text = f"pd_role: {role}\npd_buffer_size: {slots * slot_bytes}\n{shape}local_socket: {path}\nhttp_addr: 127.0.0.1:0\nquarantine_sec: 3\n"
        text += f"rank: {rank}\ntp_size: {ranks}\n"
        if role != "receiver":
            text += "pd_skip_proxy_notification: true\n"
        if role != "sender":
            text += f"pd_peer_host: 127.0.0.1\npd_peer_alloc_port: {allocs}\npd_peer_init_port: {inits}\n"
        return self.run(text + options, name, str(path), allocs[rank], inits[rank])

    def run(self, config: str, name: str, path: str, alloc: int, init: int = 0) -> Agent:
        file = self.folder / f"{name}.yaml"
        file.write_text(config)
        log = self.folder / f"{name}.log"
        with log.open("a") as stderr:
            process = subprocess.Popen([BERTH, "agent", "--config", str(file), "--announce"], stdout=subprocess.PIPE, stderr=stderr, text=True)
        agent = Agent(process, path, alloc, init, log)
        self.started.append(agent)
        assert process.stdout is not None
        line = _within(process.stdout.readline)
        assert line, f"the agent did not start:\n{log.read_text()}"
        json.loads(line)
        return agent

    def stop(self) -> None:
        for a in self.started:
            a.stop()
            if a.process.stdout:
                a.process.stdout.close()


def _within(f: Callable[[], str]) -> str:
    out: list[str] = []
    t = threading.Thread(target=lambda: out.append(f()), daemon=True)
    t.start()
    t.join(WAIT)
    return out[0] if out else ""


def until(what: Callable[[], Any], text: str, seconds: float = WAIT) -> None:
    """Ask until it is true. Only for what nobody can be woken by: another process's state."""
    tick, end = threading.Event(), time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"after {seconds:g} s: not {text}"
        tick.wait(0.02)


@pytest.fixture
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    all = Agents(tmp_path_factory.mktemp("a"))
    try:
        yield all
    finally:
        all.stop()


@pytest.fixture
def pair(agents: Agents) -> Iterator[tuple[Agent, Agent]]:
    """A sender and a receiver of 8 slots each, which must be empty at the end."""
    sender, receiver = agents.start("sender"), agents.start("receiver")
    yield sender, receiver
    for agent in (sender, receiver):
        if agent.process.poll() is None:
            until(lambda: empty(agent.status()), f"every slot of {agent.log.stem} free: {agent.status()}")


def empty(status: dict[str, Any]) -> bool:
    pools = [status[p] for p in ("pool", "staging") if status.get(p)]
    return all(p["free"] == p["capacity"] for p in pools) and not status.get("requests")


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No test leaves a thread or a descriptor."""
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    left = {t for t in set(threading.enumerate()) - before[0] if "asyncio" not in t.name}  # the executor's of a loop end with it
    assert not left, f"threads are left: {left}"
    assert len(os.listdir("/proc/self/fd")) <= before[1], os.popen(f"ls -l /proc/{os.getpid()}/fd").read()


def kill_group(process: subprocess.Popen[Any]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(WAIT)
