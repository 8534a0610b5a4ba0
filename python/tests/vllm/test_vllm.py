"""Real vLLM servers with the real model, each beside its own agent, and Berth's proxy in front: every answer equals plain vLLM's.

float32 where requests run at once: bfloat16 answers of plain vLLM depend on which requests share a step.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import AT_ONCE, FRESH, NAME, VLLM, Fleet, answer, at_once, until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    f = Fleet(tmp_path_factory.mktemp("f"))
    yield f
    f.close()


def test_answers_equal_plain_vllm(fleet: Fleet) -> None:
    computed, received = fleet.computed()
    which = fleet.asked
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
            until(lambda: (fleet.senders[0].status() or {}).get("requests"), "some request is at the agent")
        elif i % 4 == 1:
            until(lambda: fleet.receiver.pool().get("granted"), "some request is granted")
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


def test_a_lost_load_is_computed(fleet: Fleet) -> None:
    """The decode agent dies with a prompt's KV: it is offered to vLLM once, computed once, and the engine is at rest afterwards."""
    i = fleet.asked.stop
    log = fleet.decoder.log
    names = ("found ready after", "its prompt is computed here")
    before = [log.read_text().count(n) for n in names]
    local = fleet.computed()[0]
    assert fleet.lose_a_load(i, stream=True) == fleet.want[i]
    assert [log.read_text().count(n) - b for n, b in zip(names, before)] == [1, 1], "offered once, lost once"
    assert fleet.computed()[0] - local >= FRESH[0]
    fleet.restart_receiver()
    fleet.settled()
    assert ticks(fleet.decoder, 2.0) < 40, "hundredths of a second of CPU in two seconds without a request"
    fleet.transfers()


def ticks(v: VLLM, seconds: float) -> int:
    """What an engine computes without a request: one that spins takes a whole core, one at rest next to nothing."""
    before = v.ticks()
    threading.Event().wait(seconds)
    return v.ticks() - before


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
    fleet.senders[0] = fleet.sender(0)
    until(lambda: "connected to the agent of rank 0 again" in fleet.prefillers[0].log.read_text(), "connected again")
    fleet.transfers()


def test_the_decode_agent_is_killed_and_restarted(fleet: Fleet) -> None:
    which = [i for i in range(10, 36)][:16]

    def kill() -> None:
        until(lambda: (fleet.receiver.status() or {}).get("requests"), "something is under way")
        fleet.receiver.kill()

    assert judge(fleet, which, outcomes(fleet, which, kill)) == 0
    fleet.restart_receiver()
    fleet.transfers()


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
    fleet.transfers()


