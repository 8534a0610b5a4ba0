"""Real vLLM servers, agents and a proxy as processes, for tests, measurements and the demo.

Needs KV_TEST_VLLM, the environment that install-vllm.sh makes; the connector is imported from KV_TEST_SITE, into which its wheel was installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[3]
BERTH = os.environ.get("BERTH", str(ROOT / "bin" / "berth"))
VENV = pathlib.Path(os.environ.get("KV_TEST_VLLM", "/nonexistent"))
SITE = os.environ.get("KV_TEST_SITE", str(ROOT / "dist" / "vllm-site"))
MODEL = str(VENV / "model")
NAME = "smollm2"
START = 600.0  # seconds; a busy machine takes minutes to import torch in three processes
WAIT = 180.0

# SmolLM2-135M: an agent's kv_shape.
LAYERS, KV_HEADS, HEAD_SIZE = 30, 3, 64
CHUNK = 256
WIRE = {"float32": ("float", 4), "bfloat16": ("bfloat16", 2)}

_ports = iter(range(10000 + os.getpid() * 37 % 15000, 32000))


def free_port() -> int:
    for port in _ports:
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def slot_bytes(dtype: str, chunk: int = CHUNK) -> int:
    return 2 * LAYERS * chunk * KV_HEADS * HEAD_SIZE * WIRE[dtype][1]


class Process:
    """A process in a session of its own, with a log."""

    def __init__(self, name: str, folder: pathlib.Path, args: list[str], env: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("a") as out:
            self.process = subprocess.Popen(args, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}, start_new_session=True)

    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> None:
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(40)
        self.kill()


class Agent(Process):
    def __init__(self, name: str, folder: pathlib.Path, role: str, dtype: str, slots: int, notify: int = 0, options: str = "", ports: tuple[int, int] | None = None, chunk: int = CHUNK) -> None:
        self.socket = str(folder / f"{name}.sock")
        self.alloc, self.init = ports or (free_port(), free_port())
        self.http = free_port()
        text = f"pd_role: {role}\npd_buffer_size: {slots * slot_bytes(dtype, chunk)}\nkv_shape: [{LAYERS}, 2, {chunk}, {KV_HEADS}, {HEAD_SIZE}]\n"
        text += f"kv_dtype: {WIRE[dtype][0]}\nlocal_socket: {self.socket}\nhttp_addr: 127.0.0.1:{self.http}\nquarantine_sec: 5\nlease_sec: 5\npd_allocation_timeout_sec: 300\n"
        if role != "receiver":
            text += f"pd_proxy_host: 127.0.0.1\npd_proxy_port: {notify}\n" if notify else "pd_skip_proxy_notification: true\n"
        if role != "sender":
            text += f"pd_peer_host: 127.0.0.1\npd_peer_alloc_port: {self.alloc}\npd_peer_init_port: {self.init}\n"
        config = folder / f"{name}.yaml"
        config.write_text(text + options)
        super().__init__(name, folder, [BERTH, "agent", "--config", str(config)])
        until(lambda: not self.alive() or os.path.exists(self.socket) and self.status(), f"{name} serves", 30)
        assert self.alive(), self.tail()

    def status(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v1/status", timeout=10) as r:
                out: dict[str, Any] = json.load(r)
                return out
        return None

    def empty(self) -> bool:
        s = self.status() or {}
        pools = [s[p] for p in ("pool", "staging") if s.get(p)]
        return bool(pools) and all(p["free"] == p["capacity"] for p in pools) and not s.get("requests") and not s.get("waiting")


class VLLM(Process):
    """A server. core: the core on which its worker computes."""

    def __init__(self, name: str, folder: pathlib.Path, dtype: str = "float32", *, role: str = "", agent: Agent | None = None, core: int = 0, extra: dict[str, Any] | None = None, args: list[str] | None = None, policy: str = "recompute", transfer: dict[str, Any] | None = None, env: dict[str, str] | None = None, port: int = 0) -> None:
        self.port = port or free_port()
        argv = [str(VENV / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--served-model-name", NAME, "--host", "127.0.0.1"]
        argv += ["--port", str(self.port), "--enforce-eager", "--max-model-len", "2048", "--dtype", dtype, *(args or [])]
        if role and transfer is None:
            assert agent is not None
            transfer = {
                "kv_connector": "BerthConnector", "kv_connector_module_path": "berth_kv.vllm", "kv_role": role, "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {"berth_socket": agent.socket, "chunk_tokens": CHUNK, **(extra or {})},
            }  # fmt: skip
        if transfer:
            argv += ["--kv-transfer-config", json.dumps(transfer)]
        cores = os.cpu_count() or 1
        environment = {
            "PYTHONPATH": SITE, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core % cores), "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        super().__init__(name, folder, argv, {**environment, **(env or {})})

    def ready(self) -> VLLM:
        until(lambda: not self.alive() or get(self.port, "/health") is not None, f"{self.name} serves", START, self)
        assert self.alive(), self.tail(100)
        return self

    def counter(self, name: str, **labels: str) -> float:
        """Sum of a Prometheus counter."""
        total = 0.0
        for line in (get(self.port, "/metrics") or "").splitlines():
            m = re.match(rf"vllm:{name}(?:\{{(.*)\}})? (\S+)$", line)
            if m and all(f'{k}="{v}"' in (m[1] or "") for k, v in labels.items()):
                total += float(m[2])
        return total


def proxy(folder: pathlib.Path, prefillers: list[VLLM], decoders: list[tuple[VLLM, Agent]], notify: int, options: list[str] | None = None) -> tuple[Process, int]:
    port = free_port()
    argv = [BERTH, "proxy", "--host", "127.0.0.1", "--port", str(port), "--proxy-host", "127.0.0.1", "--proxy-port", str(notify)]
    argv += ["--prefiller-host", "127.0.0.1", "--prefiller-port", ",".join(str(p.port) for p in prefillers), "--num-prefillers", str(len(prefillers))]
    argv += ["--decoder-host", "127.0.0.1", "--decoder-port", ",".join(str(d.port) for d, _ in decoders), "--num-decoders", str(len(decoders))]
    argv += ["--decoder-init-port", ",".join(str(a.init) for _, a in decoders), "--decoder-alloc-port", ",".join(str(a.alloc) for _, a in decoders)]
    p = Process("proxy", folder, argv + (options or []))
    until(lambda: not p.alive() or get(port, "/health") is not None, "the proxy serves", 30, p)
    assert p.alive(), p.tail()
    return p, port


def get(port: int, path: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as r:
            return str(r.read().decode())
    except OSError:
        return None


def post(port: int, path: str, body: dict[str, Any], timeout: float = WAIT) -> dict[str, Any]:
    """A JSON answer; RuntimeError with status and body when it is no 200."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as r:
            out: dict[str, Any] = json.load(r)
            return out
    except urllib.error.HTTPError as e:
        raise RuntimeError(f"{e.code}: {e.read().decode()[:500]}") from None


def events(port: int, path: str, body: dict[str, Any], timeout: float = WAIT) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer. RuntimeError when it ends without [DONE]."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as r:
        for line in r:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RuntimeError(f"error event: {event['error']}")
                yield event
    raise RuntimeError("the stream ended without [DONE]")


def answer(port: int, prompt: dict[str, Any], stream: bool = False, tokens: int = 32, timeout: float = WAIT) -> list[int]:
    """Token ids of a greedy answer. prompt has `prompt` or `messages`."""
    path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
    body = {"model": NAME, "max_tokens": tokens, "temperature": 0, "return_token_ids": True, **prompt}
    if stream:
        return [t for e in events(port, path, body, timeout) for c in e["choices"] for t in c.get("token_ids") or []]
    ids: list[int] = post(port, path, body, timeout)["choices"][0]["token_ids"]
    return ids


def until(what: Any, text: str, seconds: float = WAIT, process: Process | None = None) -> None:
    """Ask until it is true: for what nobody can be woken by, another process's state."""
    end, tick = time.monotonic() + seconds, threading.Event()
    while not what():
        if time.monotonic() > end:
            raise AssertionError(f"after {seconds:g} s: not {text}\n{process.tail() if process else ''}")
        tick.wait(0.1)


if __name__ == "__main__":
    sys.exit("imported by tests")
