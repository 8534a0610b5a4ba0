"""`make bench-vllm`: what disaggregation costs. The same prompts of 1,000 tokens, one at a time, in turn through
- plain vLLM;
- a prefill engine with Berth's connector, asked without kv_transfer_params: nothing is transferred;
- Berth's 1P1D behind its proxy;
- vLLM's own NixlConnector, 1P1D, by the two calls that vLLM's example proxy makes (made here, without a proxy between).

The first token of Berth's proxy is the prefill engine's, so the transfer shows in the second one; NixlConnector's first is the decoder's.
NixlConnector's processes keep every core busy even without a request: they are stopped (SIGSTOP) while the others are measured.
Prints medians, ratios within this run, and the parts of a transfer.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fleet import NAME, VENV, VLLM, Agent, Process, events, free_port, post, proxy, stop

# Little memory, for there are five servers; and no prefix cache, for all get the same prompts.
ARGS = ["--num-gpu-blocks-override", "64", "--no-enable-prefix-caching"]
PATH = "/v1/completions"

Times = tuple[float, float]  # seconds to the first and to the second token


def body(tokens: int, seed: int) -> dict[str, Any]:
    prompt = random.Random(seed).choices(range(100, 40000), k=tokens)
    return {"model": NAME, "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def times(port: int, request: dict[str, Any], began: float) -> Times:
    seen: list[float] = []
    for event in events(port, PATH, request):
        for choice in event["choices"]:
            seen += [time.monotonic() - began] * len(choice.get("token_ids") or [])
    return seen[0], seen[1]


def nixl(prefill: VLLM, decode: VLLM, request: dict[str, Any]) -> Times:
    """The calls of vLLM's example proxy for NixlConnector."""
    began = time.monotonic()
    remote = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
    first = post(prefill.port, PATH, {**request, "max_tokens": 1, "kv_transfer_params": remote})
    return times(decode.port, {**request, "kv_transfer_params": first["kv_transfer_params"]}, began)


def tell(processes: list[Process], n: int) -> None:
    """Send a signal to every process of their sessions."""
    for p in processes:
        for pid in p.members():
            with suppress(OSError):
                os.kill(pid, n)


@contextmanager
def running(processes: list[Process]) -> Iterator[None]:
    """Let stopped processes run for a while."""
    tell(processes, signal.SIGCONT)
    try:
        yield
    finally:
        tell(processes, signal.SIGSTOP)


def seconds(v: VLLM, name: str) -> float:
    return v.counter(f"{name}_seconds_sum")


def logged(p: Process, pattern: str) -> list[float]:
    return [float(x) for x in re.findall(pattern, p.log.read_text())]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # float32: without AVX512 or AMX bfloat16 is emulated, twenty seconds for such a prompt.
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--no-nixl", action="store_true")
    parser.add_argument("--pause", action="store_true", help="when the servers are ready, wait for a line on standard input")
    o = parser.parse_args()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="berth-cost-"))
    processes: list[Process] = []

    def add(p: Any) -> Any:
        processes.append(p)
        return p

    failed = True
    try:
        notify = free_port()
        sender = add(Agent("sender", folder, "sender", o.dtype, 16, notify))
        receiver = add(Agent("receiver", folder, "receiver", o.dtype, 20))
        settings: dict[str, Any] = {"args": ARGS, "extra": {"timings": True}}
        plain = add(VLLM("plain", folder, o.dtype, core=0, args=ARGS))
        prefill = add(VLLM("prefill", folder, o.dtype, role="kv_producer", agent=sender, core=0, **settings))
        decode = add(VLLM("decode", folder, o.dtype, role="kv_consumer", agent=receiver, core=1, **settings))
        for v in (plain, prefill, decode):
            v.ready()
        front, port = proxy(folder, [prefill], [(decode, receiver)], notify)
        add(front)
        parts: dict[str, list[float]] = {"queue": [], "prefill": [], "HTTP": []}

        def berth(request: dict[str, Any]) -> Times:
            names = {"queue": "request_queue_time", "prefill": "request_prefill_time"}
            before = {part: seconds(prefill, name) for part, name in names.items()}
            got = times(port, request, time.monotonic())
            spent = {part: seconds(prefill, name) - before[part] for part, name in names.items()}
            for part, s in spent.items():
                parts[part].append(1000 * s)
            parts["HTTP"].append(1000 * (got[0] - sum(spent.values())))
            return got

        arms: dict[str, Callable[[dict[str, Any]], Times]] = {
            "plain vLLM": lambda r: times(plain.port, r, time.monotonic()),
            "connector, no transfer": lambda r: times(prefill.port, r, time.monotonic()),
            "Berth 1P1D": berth,
        }
        others: list[Process] = []
        if not o.no_nixl:
            pair = []
            for name, role, core in (("nixl-prefill", "kv_producer", 0), ("nixl-decode", "kv_consumer", 1)):
                transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
                env = {"PYTHONPATH": str(VENV / "nixl"), "UCX_TLS": "all", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
                pair.append(add(VLLM(name, folder, o.dtype, core=core, args=ARGS, transfer=transfer, env=env)))
            others += pair
            for v in pair:
                v.ready()

            def through_nixl(request: dict[str, Any]) -> Times:
                with running(others):
                    return nixl(*pair, request)

            arms["NixlConnector 1P1D"] = through_nixl
            nixl(*pair, body(o.tokens, 1))
            tell(others, signal.SIGSTOP)
        for name, ask in arms.items():
            ask(body(o.tokens, 1))  # the first is slow everywhere
        print("the servers are ready", file=sys.stderr, flush=True)
        if o.pause:
            sys.stdin.readline()
        for values in parts.values():
            values.clear()
        load = os.getloadavg()[0]
        got: dict[str, list[Times]] = {name: [] for name in arms}
        for n in range(o.rounds):
            for name, ask in arms.items():
                got[name].append(ask(body(o.tokens, 1000 + n)))

        def middle(name: str, i: int) -> float:
            return statistics.median(t[i] for t in got[name])

        print(f"{o.tokens} tokens, {o.dtype}, {o.rounds} of each in turn; load average at the start {load:.1f}")
        print(f"{'':24}{'first token, s':>24}{'x plain':>9}{'second token, s':>18}{'x plain':>9}")
        for name, t in got.items():
            first, second = middle(name, 0), middle(name, 1)
            print(f"{name:24}{first:8.3f} ({min(x[0] for x in t):.3f}-{max(x[0] for x in t):.3f}){first / middle('plain vLLM', 0):9.2f}"
                  f"{second:18.3f}{second / middle('plain vLLM', 1):9.2f}")  # fmt: skip
        if not o.no_nixl:
            print(f"Berth / NixlConnector: first token {middle('Berth 1P1D', 0) / middle('NixlConnector 1P1D', 0):.2f}, second {middle('Berth 1P1D', 1) / middle('NixlConnector 1P1D', 1):.2f}")
        r = o.rounds
        sent = logged(prefill, rf"gather [0-9.]+ ms for {o.tokens} tokens, submitted at ([0-9.]+)")
        ready = logged(prefill, r"ready at ([0-9.]+)")
        parts["admission"] = logged(prefill, r"admission ([0-9.]+) ms")[-r:]
        parts["gather"] = logged(prefill, rf"gather ([0-9.]+) ms for {o.tokens} tokens")[-r:]
        parts["transfer"] = [1000 * (b - a) for a, b in zip(sent, ready)][-r:]
        parts["wait"] = logged(decode, rf"found ready after ([0-9.]+) ms, {o.tokens} tokens")[-r:]
        parts["scatter"] = logged(decode, rf"scatter ([0-9.]+) ms for {o.tokens} tokens")[-r:]
        assert all(len(v) == r for v in parts.values()), {k: len(v) for k, v in parts.items()}
        print("Berth's parts, medians in ms: " + ", ".join(f"{k} {statistics.median(v):.1f}" for k, v in parts.items()))
        failed = False
    finally:
        tell(processes, signal.SIGCONT)
        stop(processes)
        if failed:
            print(f"logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
