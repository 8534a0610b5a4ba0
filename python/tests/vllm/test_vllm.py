"""Real vLLM servers with the real model, each beside its own agent, and Berth's proxy in front: every answer equals plain vLLM's.

float32 where requests run at once: bfloat16 answers of plain vLLM depend on which requests share a step.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import NAME, ROOT, VLLM, Agent, Process, answer, events, free_port, get, post, proxy, until

LENGTHS = [5, 6, 17, 31, 64, 100, 127, 128, 129, 200, 255, 256, 257, 300, 384, 400, 450, 511, 512, 513]  # twice, with what follows
LENGTHS += [20, 30, 40, 60, 90, 140, 180, 220, 260, 320, 350, 420, 600, 640, 700, 768, 800, 1000, 1400, 1800]
AT_ONCE = 8


def at_once(f: Any, items: list[Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(f, items))


class Fleet:
    """Prefill engines, one decode engine, and the answers of one plain server."""

    def __init__(self, folder: pathlib.Path, prefillers: int, dtype: str = "float32", p_args: list[str] | None = None, d_args: list[str] | None = None, plain_args: list[str] | None = None, policy: str = "recompute") -> None:
        self.folder, self.dtype, self.d_args, self.policy = folder, dtype, d_args, policy
        self.notify = free_port()
        self.processes: list[Process] = []
        try:
            self.plain = self.add(VLLM("plain", folder, dtype, core=1, args=plain_args))
            self.senders = [self.add(Agent(f"sender-{i}", folder, "sender", dtype, 8, self.notify)) for i in range(prefillers)]
            self.receiver = self.add(Agent("receiver", folder, "receiver", dtype, 20))
            self.p_args = p_args
            self.prefillers = [self.prefiller(i) for i in range(prefillers)]
            self.decoder = self.decode_engine()
            self.plain.ready()
            text = "".join((ROOT / name).read_text() for name in ("PROTOCOL.md", "README.md", "ARCHITECTURE.md"))
            ids = post(self.plain.port, "/tokenize", {"model": NAME, "prompt": text})["tokens"]
            self.prompts: list[dict[str, Any]] = [{"prompt": ids[i * 311 % (len(ids) - n) :][:n]} for i, n in enumerate(LENGTHS)]
            for i in range(0, len(self.prompts), 4):  # every fourth is a chat
                words = text[i * 500 : i * 500 + 4 * LENGTHS[i]]
                self.prompts[i] = {"messages": [{"role": "user", "content": "Say what this is about: " + words}]}
            self.prompts += [{"prompt": ids[:600] + ids[5000 + 50 * i :][: 20 + 70 * i]} for i in range(4)]  # a shared prefix
            self.want = at_once(lambda p: answer(self.plain.port, p), self.prompts)
            self.plain.stop()
            for v in (*self.prefillers, self.decoder):
                v.ready()
            _, self.port = self.add(proxy(folder, self.prefillers, [(self.decoder, self.receiver)], self.notify))
        except BaseException:
            self.close()
            raise

    def add(self, p: Any) -> Any:
        self.processes.append(p[0] if isinstance(p, tuple) else p)
        return p

    def prefiller(self, i: int, port: int = 0) -> VLLM:
        return self.add(VLLM(f"prefill-{i}", self.folder, self.dtype, role="kv_producer", agent=self.senders[i], core=i, args=self.p_args, port=port))  # type: ignore[no-any-return]

    def decode_engine(self) -> VLLM:
        return self.add(VLLM("decode", self.folder, self.dtype, role="kv_consumer", agent=self.receiver, core=1, args=self.d_args, policy=self.policy))  # type: ignore[no-any-return]

    def ask(self, i: int) -> list[int]:
        """The proxy's answer to prompt i; every other one streamed."""
        return answer(self.port, self.prompts[i], stream=i % 2 == 0)

    def computed(self) -> tuple[float, float]:
        """Prompt tokens that the decoder computed, and those that came from elsewhere."""
        return (self.decoder.counter("prompt_tokens_by_source_total", source="local_compute"),
                self.decoder.counter("prompt_tokens_by_source_total", source="external_kv_transfer"))  # fmt: skip

    def equal(self, which: list[int]) -> None:
        got = at_once(self.ask, which)
        wrong = [(i, g, self.want[i]) for i, g in zip(which, got) if g != self.want[i]]
        assert not wrong, wrong

    def settled(self) -> None:
        """Every slot is free, and every block."""
        for a in (*self.senders, self.receiver):
            if a.alive():
                until(a.empty, f"every slot of {a.name} free: {a.status()}", 60, a)
        for v in (*self.prefillers, self.decoder):
            if v.alive():
                until(lambda v=v: v.counter("num_requests_running") == 0 and v.counter("kv_cache_usage_perc") == 0, f"{v.name} has nothing left", 60)

    def close(self) -> None:
        for p in reversed(self.processes):
            p.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    f = Fleet(tmp_path_factory.mktemp("f"), 1)
    yield f
    f.close()


def test_answers_equal_plain_vllm(fleet: Fleet) -> None:
    computed, received = fleet.computed()
    which = list(range(len(fleet.prompts)))
    fleet.equal(which)
    fleet.settled()
    more, arrived = fleet.computed()
    assert more - computed <= len(which), "the decoder computes at most the last token of each prompt"
    assert arrived > received
    assert "not loaded" not in fleet.decoder.log.read_text()


def test_aborts_in_every_phase(fleet: Fleet) -> None:
    """Clients that leave while they wait, while the prompt is computed or sent, and while the answer is generated."""

    def leave(i: int) -> None:
        body = {"model": NAME, "prompt": [(i * 7919 + j * 31) % 40000 for j in range(700)], "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
        c = http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=120)
        c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        if i % 4 == 0:
            until(lambda: fleet.senders[0].status()["requests"], "some request is at the agent")  # type: ignore[index]
        elif i % 4 == 1:
            until(lambda: fleet.receiver.status()["pool"]["granted"], "some request is granted")  # type: ignore[index]
        else:
            r = c.getresponse()
            for _ in range(2 if i % 4 == 2 else 12):
                r.readline()
            r.close()
        c.close()

    at_once(leave, list(range(12)))
    fleet.settled()
    fleet.equal([1, 2, 3])


def test_requests_without_a_transfer(fleet: Fleet) -> None:
    """Whoever asks an engine itself gets what plain vLLM says."""
    for v in (fleet.prefillers[0], fleet.decoder):
        assert [answer(v.port, fleet.prompts[i]) for i in (3, 13)] == [fleet.want[i] for i in (3, 13)]


def outcomes(fleet: Fleet, which: list[int], at: Any) -> list[Any]:
    """Answers or errors of requests, while something happens in their midst."""

    def one(i: int) -> Any:
        try:
            return fleet.ask(i)
        except (RuntimeError, OSError, http.client.HTTPException) as e:
            return e

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE + 1) as pool:
        running = [pool.submit(one, i) for i in which]
        at()
        return [f.result() for f in running]


def judge(fleet: Fleet, which: list[int], got: list[Any]) -> int:
    """Every request has the right tokens or a clear error; returns how many have an error."""
    wrong = [(i, g) for i, g in zip(which, got) if isinstance(g, list) and g != fleet.want[i]]
    assert not wrong, wrong
    return sum(not isinstance(g, list) for g in got)


def test_the_prefill_agent_is_killed_and_restarted(fleet: Fleet) -> None:
    which = [i for i in range(14, 40)][:16]
    old = fleet.senders[0]

    def kill() -> None:
        until(lambda: (old.status() or {}).get("requests"), "something is under way")
        old.kill()

    assert judge(fleet, which, outcomes(fleet, which, kill)) == 0  # computed by the decoder instead
    fleet.equal([5, 6])
    fleet.senders[0] = fleet.add(Agent("sender-0", fleet.folder, "sender", fleet.dtype, 8, fleet.notify))
    until(lambda: "connected to the agent of rank 0 again" in fleet.prefillers[0].log.read_text(), "connected again")
    transfers(fleet)


def transfers(fleet: Fleet) -> None:
    """KV travels again."""
    def received() -> bool:
        before = fleet.computed()[1]
        fleet.equal([12])
        return fleet.computed()[1] > before

    until(received, "KV travels again", 120)
    fleet.settled()


def test_the_decode_agent_is_killed_and_restarted(fleet: Fleet) -> None:
    which = [i for i in range(10, 36)][:16]
    old = fleet.receiver

    def kill() -> None:
        until(lambda: (old.status() or {}).get("requests"), "something is under way")
        old.kill()

    assert judge(fleet, which, outcomes(fleet, which, kill)) == 0
    fleet.receiver = fleet.add(Agent("receiver", fleet.folder, "receiver", fleet.dtype, 20, ports=(old.alloc, old.init)))
    until(lambda: fleet.decoder.log.read_text().count("connected to the agent of rank 0 again") >= 2, "both sides are connected again")
    transfers(fleet)


def test_the_prefill_engine_is_killed_and_restarted(fleet: Fleet) -> None:
    which = list(range(14, 24))
    old = fleet.prefillers[0]

    def kill() -> None:
        until(lambda: (fleet.senders[0].status() or {}).get("requests"), "something is under way")
        old.kill()

    judge(fleet, which, outcomes(fleet, which, kill))
    for a in (fleet.senders[0], fleet.receiver):
        until(a.empty, f"every slot of {a.name} free: {a.status()}", 60, a)
    assert answer(fleet.decoder.port, fleet.prompts[3]) == fleet.want[3]
    fleet.prefillers[0] = fleet.prefiller(0, old.port).ready()
    transfers(fleet)


def test_other_settings(tmp_path: pathlib.Path) -> None:
    """Two prefill engines; chunked prefill, no prefix cache, and so few blocks that prompts are preempted."""
    small = ["--max-num-batched-tokens", "256", "--no-enable-prefix-caching", "--num-gpu-blocks-override", "24"]
    f = Fleet(tmp_path, 2, p_args=small, d_args=["--no-enable-prefix-caching", "--num-gpu-blocks-override", "24"])
    try:
        f.equal(list(range(len(f.prompts))))
        f.settled()
        assert sum(v.counter("num_preemptions_total") for v in (*f.prefillers, f.decoder)) > 0, "nothing was preempted"
        assert get(f.port, "/health") is not None
    finally:
        f.close()


def test_bfloat16_one_by_one(tmp_path: pathlib.Path) -> None:
    """The decoder computes the last token as a step of its own, which rounds otherwise than a prefill does: a few answers may differ."""
    f = Fleet(tmp_path, 1, dtype="bfloat16")
    try:
        differ = [i for i in range(len(f.prompts)) if f.ask(i) != f.want[i]]
        f.settled()
        assert len(differ) <= len(f.prompts) // 8, differ
        assert list(events(f.port, "/v1/completions", {"model": NAME, "prompt": [1, 2, 3], "max_tokens": 2}))
    finally:
        f.close()
