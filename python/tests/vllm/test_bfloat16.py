"""Real vLLM servers in bfloat16, and with vLLM's default policy for a load that fails."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import LENGTHS, NAME, VLLM, Fleet, answer, post, until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    f = Fleet(tmp_path_factory.mktemp("f"), dtype="bfloat16", policy="fail", beside=True)
    yield f
    f.close()


def test_bfloat16_one_by_one(fleet: Fleet) -> None:
    """The decoder computes the last token as a step of its own, which rounds otherwise than a prefill does. Where an answer differs, plain
    vLLM's own arithmetic was undecided: it gives the two tokens the same probability up to the last bits of a bfloat16."""
    f, which = fleet, range(len(LENGTHS))
    assert f.plain
    computed, received = f.computed()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # each server has one request at a time: what several are answered depends on who shares a step
        plain = pool.submit(lambda: [answer(f.plain.port, f.prompts[i]) for i in which])
        got = [f.ask(i) for i in which]
        want = plain.result()
    f.settled()
    more, arrived = f.computed()
    assert arrived > received and more - computed <= len(which)
    gaps = {}
    for i, a, b in zip(which, got, want):
        if a != b:
            n = next(n for n, (x, y) in enumerate(zip(a, b)) if x != y)
            gaps[i] = gap(f.plain, f.prompts[i], b[:n], a[n], b[n])
    f.plain.stop()
    assert all(abs(g) <= 0.25 for g in gaps.values()), gaps
    assert len(gaps) <= len(which) // 8, gaps


def gap(v: VLLM, prompt: dict[str, Any], begun: list[int], a: int, b: int) -> float:
    """How far apart two tokens' log probabilities are after a prompt and the beginning of an answer."""
    ids = prompt["prompt"] if "prompt" in prompt else post(v.port, "/tokenize", {"model": NAME, **prompt})["tokens"]
    body = {"model": NAME, "prompt": ids + begun, "max_tokens": 1, "temperature": 0, "logprobs": 5, "return_tokens_as_token_ids": True}
    top: dict[str, float] = post(v.port, "/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0]
    return top[f"token_id:{a}"] - top[f"token_id:{b}"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_load_fails_by_policy(fleet: Fleet, stream: bool) -> None:
    """With vLLM's default policy a request ends with an error that says so, and the others go on."""
    f = fleet
    i = f.asked.stop + stream
    got = f.lose_a_load(i, stream)
    assert isinstance(got, RuntimeError) and "the decode engine failed" in str(got), got
    f.restart_receiver()
    f.settled()
    f.transfers()
    assert answer(f.decoder.port, f.prompts[3])


def test_a_second_engine_at_an_agent_is_refused(fleet: Fleet) -> None:
    """Two engines cannot share an agent: the second does not start, and says who holds it."""
    f = fleet
    second: VLLM = f.add(VLLM("second", f.folder, f.dtype, role="kv_producer", agent=f.senders[0], extra={"connect_timeout": 1}))
    until(lambda: not second.alive(), "it ends", 600, second)
    first = f.senders[0].status()["engine"]  # type: ignore[index]
    assert any("holds this agent" in line and first in line for line in second.log.read_text().splitlines()), second.tail()
    f.transfers()
