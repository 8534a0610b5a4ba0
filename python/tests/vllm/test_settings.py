"""Real vLLM servers with other settings: several prefill engines, no prefix cache, little memory; and LMCache's proxy in front."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator

import pytest
from fleet import CHUNK, MODEL, NAME, VENV, Fleet, Process, answer, at_once, events, free_port, get, post, slot_bytes, until

SMALL = ["--no-enable-prefix-caching", "--block-size"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two prefill engines; chunked prefill, no prefix cache, blocks of another size on each side, and hardly more of them than one prompt needs."""
    p_args = ["--max-num-batched-tokens", "256", *SMALL, "64", "--num-gpu-blocks-override", "34"]
    f = Fleet(tmp_path_factory.mktemp("f"), 2, p_args=p_args, d_args=[*SMALL, "32", "--num-gpu-blocks-override", "66"], find=True)
    yield f
    f.close()


def test_two_prefill_engines_and_little_memory(two: Fleet) -> None:
    received = two.computed()[1]
    # Each engine answers requests of its own, which grow until they need more blocks than there are: who came last is preempted.
    short = [i for i in two.asked if len(two.prompts[i].get("prompt", ())) in range(1, 70)]
    own = [(v, i) for v in (*two.prefillers, two.decoder) for i in 2 * short]
    with concurrent.futures.ThreadPoolExecutor(len(own)) as pool:
        others = [pool.submit(answer, v.port, {**two.prompts[i], "ignore_eos": True}, tokens=150) for v, i in own]
        two.equal(two.asked)
        for (v, i), f in zip(own, others):
            assert f.result()[: len(two.want[i])] == two.want[i], (v.name, i)
    two.settled()
    for which in (two.prefillers, [two.decoder]):
        assert sum(v.counter("num_preemptions_total") for v in which) > 0, f"{which[0].name} preempted nothing"
    assert two.computed()[1] > received
    assert all(v.counter("prompt_tokens_total") > 0 for v in two.prefillers)


def test_lmcache_proxy(two: Fleet) -> None:
    """LMCache's example proxy, unchanged and in LMCache's own environment: it names no request to the decode engine, which finds it by keys."""
    two.front.stop()  # LMCache's proxy hears the agents at the same port
    python, script = os.environ["KV_TEST_LMCACHE"], str(VENV / "lmcache" / "disagg_proxy_server.py")
    port = free_port()
    argv = [python, script, "--host", "127.0.0.1", "--port", str(port), "--proxy-host", "127.0.0.1", "--proxy-port", str(two.notify)]
    argv += ["--prefiller-host", "127.0.0.1", "--prefiller-port", ",".join(str(p.port) for p in two.prefillers), "--num-prefillers", "2"]
    argv += ["--decoder-host", "127.0.0.1", "--decoder-port", str(two.decoder.port), "--num-decoders", "1"]
    argv += ["--decoder-init-port", str(two.receiver.init), "--decoder-alloc-port", str(two.receiver.alloc)]
    argv += ["--model", MODEL, "--pd-buffer-size", str(20 * slot_bytes(two.dtype)), "--chunk-size", str(CHUNK)]
    env = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "LMCACHE_TRACK_USAGE": "false"}
    front: Process = two.add(Process("lmcache-proxy", two.folder, argv, env))
    until(lambda: not front.alive() or get(port, "/openapi.json"), "LMCache's proxy serves", 120, front)
    assert front.alive(), front.tail()
    texts = {}  # it has prompts tokenized: those that come back as they were
    for i in two.asked:
        if ids := two.prompts[i].get("prompt"):
            text = post(two.decoder.port, "/detokenize", {"model": NAME, "tokens": ids})["prompt"]
            if post(two.decoder.port, "/tokenize", {"model": NAME, "prompt": text})["tokens"] == ids:
                texts[i] = text
    which = list(texts)[:12]
    assert len(which) == 12
    computed, received = two.computed()

    def ask(i: int) -> list[int]:
        body = {"model": NAME, "prompt": texts[i], "max_tokens": 32, "temperature": 0, "return_token_ids": True}
        return [t for e in events(port, "/v1/completions", body) for c in e["choices"] for t in c.get("token_ids") or []]

    got = at_once(ask, which, 4)
    # Its first event is the first token, as text only.
    assert [(i, g) for i, g in zip(which, got) if g != two.want[i][1:]] == []
    two.settled()
    tokens = sum(len(two.prompts[i]["prompt"]) for i in which)
    more, arrived = two.computed()
    assert arrived - received == tokens and more - computed == len(which), "the decoder computes the last token of each"
    front.stop()
    two.front, two.port = two.proxy()
    two.transfers()
