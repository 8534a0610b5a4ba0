"""Both sides of the connector, hook by hook, over real agents and real CPU caches."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from rig import BLOCK, Engine1, Pair, agents, common, eventually, pairs, request, truth

import berth_kv
from berth_kv import AgentError
from berth_kv.vllm.cache import CPUCache, TokenCache, strided_view
from berth_kv.vllm.settings import Settings, Spec

__all__ = ["agents", "pairs"]
Pairs = Callable[..., Pair]


def prompt(n: int, seed: int = 0) -> list[int]:
    return [(i * 7919 + seed * 104729) % 49152 for i in range(n)]


@pytest.mark.parametrize("chunk", [64, 48, 16])
@pytest.mark.parametrize("most", [1 << 20, 50])
def test_prompts_travel(pairs: Pairs, chunk: int, most: int) -> None:
    pair = pairs(chunk=chunk)
    for n in (1, 31, 32, 63, 64, 65, 200):
        pair.send(f"r{n}", prompt(n), most)
        r = pair.decode_request(f"r{n}", prompt(n))
        assert pair.d.load(r) == n
        pair.check(r, n)
        assert pair.d.matched(r) == (0, False)  # after a preemption
        pair.d.finish(r)
    assert not pair.d.invalid


def test_two_ranks(pairs: Pairs) -> None:
    pair = pairs(ranks=2)
    for n in (1, 130):
        pair.send(f"r{n}", prompt(n), 70)
        r = pair.decode_request(f"r{n}", prompt(n))
        assert pair.d.load(r) == n
        pair.check(r, n)
        pair.d.finish(r)


def test_a_local_prefix_is_not_loaded(pairs: Pairs) -> None:
    pair = pairs()
    pair.send("r", prompt(150))
    r = pair.decode_request("r", prompt(150))
    assert pair.d.load(r, computed=2 * BLOCK) == 150 - 2 * BLOCK
    pair.check(r, 150, 2 * BLOCK)
    assert pair.d.cached(r, 0, 2 * BLOCK).eq(0).all()  # not touched
    pair.d.finish(r)
    for n in (60, 2 * BLOCK):  # less than it has, and just that
        pair.send(f"s{n}", prompt(n))
        s = pair.decode_request(f"s{n}", prompt(n))
        assert pair.d.load(s, computed=2 * BLOCK) == 0
        eventually(pair.empty, "its slots are free while it is still computed")
        pair.d.finish(s)


def test_every_overlap_of_a_local_prefix_and_a_chunk(pairs: Pairs) -> None:
    """r25: a chunk that begins 1 to BLOCK tokens before the end of what the decoder has by itself."""
    pair = pairs(chunk=BLOCK + 1, slots=40)
    overlaps = set()
    for blocks in range(1, BLOCK + 1):
        local, n = blocks * BLOCK, (blocks + 2) * BLOCK + 5
        overlaps.add(local % (BLOCK + 1))
        pair.send(f"r{n}", prompt(n))
        r = pair.decode_request(f"r{n}", prompt(n))
        assert pair.d.load(r, computed=local) == n - local
        pair.check(r, n, local)
        assert torch.isin(pair.d.cached(r, 0, local), torch.tensor([0.0, -1.0])).all()  # not touched: new, or freed before
        pair.d.finish(r)
    assert overlaps == set(range(1, BLOCK + 1))


def test_a_prefix_hit_of_the_prefill_engine_is_sent(pairs: Pairs) -> None:
    pair = pairs()
    r = pair.prefill_request("r", prompt(150))
    assert pair.p.admitted(r, 3 * BLOCK) == (0, False)
    pair.p.take("p-r", 150)
    pair.p.workers[0]._cache.scatter(pair.p.tables["p-r"], 0, 3 * BLOCK, truth(prompt(150), 0)[:, :, : 3 * BLOCK])
    pair.p.prefill(r, computed=3 * BLOCK)
    pair.p.finish(r)
    d = pair.decode_request("r", prompt(150))
    assert pair.d.load(d) == 150
    pair.check(d, 150)
    pair.d.finish(d)


@pytest.mark.parametrize("at", [40, 64, 130, 199])
def test_preemption(pairs: Pairs, at: int) -> None:
    pair = pairs(staging=2)
    r = pair.prefill_request("r", prompt(200))
    pair.p.admitted(r)
    pair.p.step({"p-r": (r, 0, at)})
    pair.p.step(preempted=["p-r"])  # its blocks hold something else at once
    assert pair.p.matched(r) == (0, False)
    pair.p.prefill(r, 70)
    pair.p.finish(r)
    d = pair.decode_request("r", prompt(200))
    assert pair.d.load(d) == 200
    pair.check(d, 200)
    pair.d.finish(d)


def test_more_prompts_than_staging_slots(pairs: Pairs) -> None:
    """Every prompt is larger than the staging pool; none waits for ever, and each step submits what has slots."""
    pair = pairs(chunk=32, staging=2, slots=40)
    work = {}
    for i in range(6):
        r = pair.prefill_request(f"r{i}", prompt(150, i))
        pair.p.admitted(r)
        work[r.request_id] = (r, 0, 150)
    pair.p.step(work)
    for i, (r, _, _) in enumerate(work.values()):
        pair.p.finish(r)
    for i in range(6):
        d = pair.decode_request(f"r{i}", prompt(150, i))
        assert pair.d.load(d) == 150
        pair.check(d, 150)
        pair.d.finish(d)


def test_blocks_that_come_back_soon(pairs: Pairs) -> None:
    """vLLM waits for the blocks of finished prompts that are being copied, in place of a preemption, but not for those of a receiver that has stopped."""
    pair = pairs(chunk=32, staging=2)
    r = pair.prefill_request("r", prompt(150))
    pair.p.admitted(r)
    assert not pair.p.scheduler.frees_soon()
    pair.receivers[0].process.send_signal(signal.SIGSTOP)
    try:
        pair.p.prefill(r)
        r.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        assert pair.p.scheduler.finished(r)[0]
        assert pair.p.scheduler.frees_soon()
        eventually(lambda: pair.p.step() or not pair.p.scheduler.frees_soon(), "it waits no longer")
        assert not pair.p.sent
    finally:
        pair.receivers[0].process.send_signal(signal.SIGCONT)
    eventually(lambda: pair.p.step() or pair.p.sent, "it is sent")
    assert not pair.p.scheduler._freeing
    d = pair.decode_request("r", prompt(150))
    assert pair.d.load(d) == 150
    pair.d.finish(d)


def test_what_is_a_warning(pairs: Pairs) -> None:
    """A transfer that somebody cancelled, whose client has left, is no warning; one that failed is."""
    seen: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    log = logging.getLogger("vllm.berth")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        pair = pairs(slots=4, max_model_len=200)
        for req, n in (("left", 100), ("large", 300)):
            r = pair.prefill_request(req, prompt(n))
            assert pair.p.admitted(r) == (0, False)
            if req == "left":
                with berth_kv.connect(pair.senders[0].socket, part="tool") as tool:
                    tool.cancel("left")
            eventually(lambda req=req: any(req in m and "not sent" in m for _, m in seen), "it is said")
            pair.p.finish(r, "FINISHED_ABORTED")
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    said = [(level, m.partition(" is not sent: ")[2].split(":")[0]) for level, m in seen if "not sent" in m]
    assert said == [("INFO", "cancelled"), ("WARNING", "too_large")]


def test_admission_order_and_room(pairs: Pairs) -> None:
    pair = pairs(slots=4, admit_ahead=2, max_model_len=200)
    first = pair.prefill_request("first", prompt(200))
    assert pair.p.admitted(first) == (0, False)
    waiting = [pair.prefill_request(f"w{i}", prompt(100, i)) for i in range(4)]
    for _ in range(3):
        assert [pair.p.matched(w) for w in waiting] == [(None, False)] * 4
    eventually(lambda: len(pair.receivers[0].status()["requests"]) == 3, "two wait at the receiver, two in the engine's queue")
    pair.p.finish(waiting[1], "FINISHED_ABORTED")
    pair.p.prefill(first)
    pair.p.finish(first)
    d = pair.decode_request("first", prompt(200))
    assert pair.d.load(d) == 200
    for i, w in ((0, waiting[0]), (2, waiting[2]), (3, waiting[3])):
        pair.p.admitted(w)
        pair.p.prefill(w)
        pair.p.finish(w)
        x = pair.decode_request(f"w{i}", prompt(100, i))
        assert pair.d.load(x) == 100
        pair.check(x, 100)
        pair.d.finish(x)
    pair.d.finish(d)


def test_what_can_never_fit_is_computed_all_the_same(pairs: Pairs) -> None:
    pair = pairs(slots=4, max_model_len=200)
    r = pair.prefill_request("r", prompt(300))
    assert pair.p.admitted(r) == (0, False)
    pair.p.prefill(r, 100)
    pair.p.finish(r)
    d = pair.decode_request("r", prompt(300))
    assert pair.d.admitted(d) == (0, False)
    pair.d.finish(d)


@pytest.mark.parametrize("phase", ["queued", "waiting", "granted", "half", "whole", "preempted"])
def test_aborts_while_sending(pairs: Pairs, phase: str) -> None:
    pair = pairs(slots=4, staging=2, max_model_len=200)
    r = pair.prefill_request("r", prompt(200))
    other = pair.prefill_request("other", prompt(200, 1))
    if phase == "waiting":
        pair.p.admitted(other)
    if phase in ("queued", "waiting"):
        assert pair.p.matched(r) == (None, False)
    else:
        pair.p.admitted(r)
    if phase in ("half", "preempted"):
        pair.p.step({"p-r": (r, 0, 130)})
    if phase == "preempted":
        pair.p.step(preempted=["p-r"])
    if phase == "whole":
        pair.p.step({"p-r": (r, 0, 200)})
    pair.p.finish(r, "FINISHED_ABORTED")
    if phase == "waiting":
        pair.p.finish(other, "FINISHED_ABORTED")
    eventually(lambda: pair.empty() or phase == "whole" and pair.receivers[0].status()["pool"]["granted"] == 0, "all is given back")
    if phase == "whole":  # it may have become ready first: then it waits for the decoder
        d = pair.decode_request("r", prompt(200))
        pair.d.load(d)
        pair.d.finish(d)
    pair.send("next", prompt(200, 2))
    d = pair.decode_request("next", prompt(200, 2))
    assert pair.d.load(d) == 200
    pair.d.finish(d)


@pytest.mark.parametrize("phase", ["waiting", "ready", "allocated", "loaded"])
def test_aborts_while_receiving(pairs: Pairs, phase: str) -> None:
    pair = pairs()
    r = pair.decode_request("r", prompt(100))
    if phase == "waiting":
        assert pair.d.matched(r) == (None, False)
        pair.d.finish(r, "FINISHED_ABORTED")
        return
    pair.send("r", prompt(100))
    n, _ = pair.d.admitted(r)
    assert n == 100
    if phase == "allocated":
        pair.d.allocate(r, 100, 100)
    if phase == "loaded":
        pair.d.allocate(r, 100, 100)
        eventually(lambda: pair.d.step() or r.request_id in pair.d.received, "received")
    r.status = None
    assert pair.d.scheduler.finished(r)[0] is False
    eventually(lambda: pair.d.step() or pair.empty(), "released")
    if phase == "allocated":
        eventually(lambda: pair.d.step() or r.request_id in pair.d.received, "reported: vLLM frees its blocks then")


def test_blocks_that_vllm_does_not_give(pairs: Pairs) -> None:
    """vLLM may admit a request without what was offered: then it is released."""
    pair = pairs()
    pair.send("r", prompt(100))
    r = pair.decode_request("r", prompt(100))
    pair.d.admitted(r)
    pair.d.allocate(r, 100, 0)
    eventually(pair.empty, "released")
    assert pair.d.matched(r) == (0, False)


def test_a_failed_load_is_offered_once(pairs: Pairs) -> None:
    pair = pairs()
    pair.send("r", prompt(100))
    r = pair.decode_request("r", prompt(100))
    assert pair.d.admitted(r) == (100, True)
    pair.receivers[0].kill()
    eventually(lambda: pair.d.workers[0]._links._clients[0].__class__ is AgentError, "the worker notices")
    pair.d.allocate(r, 100, 100)
    eventually(lambda: pair.d.step() or r.request_id in pair.d.received, "reported")
    assert pair.d.invalid == set(pair.d.tables[r.request_id])
    assert pair.d.matched(r) == (0, False)
    pair.d.finish(r)
    other = pair.decode_request("other", prompt(10))
    assert pair.d.admitted(other) == (0, False)
    pair.d.finish(other)


def test_another_prompt_under_that_name(pairs: Pairs) -> None:
    pair = pairs()
    pair.send("r", prompt(150))
    other = prompt(64) + prompt(86, seed=5)
    r = pair.decode_request("r", other)
    assert pair.d.load(r) == 64  # the common chunk
    assert torch.equal(pair.d.cached(r, 0, 64), truth(prompt(150), 0)[:, :, :64])
    pair.d.finish(r)
    pair.send("s", prompt(150))
    s = pair.decode_request("s", prompt(150, seed=9))
    assert pair.d.load(s) == 0
    pair.d.finish(s)


@pytest.mark.parametrize("more", [
    {"lora_request": SimpleNamespace(lora_name="a")}, {"cache_salt": "a"}, {"mm_features": [SimpleNamespace(identifier="a")]},
])  # fmt: skip
def test_the_same_tokens_with_other_kv(pairs: Pairs, more: dict[str, Any]) -> None:
    """Of another LoRA adapter, cache salt or image."""
    pair = pairs()
    for req, same in (("r", False), ("s", True)):
        p = request(f"p-{req}", prompt(100), pair.spec(req), **more)
        assert pair.p.admitted(p) == (0, False)
        pair.p.prefill(p)
        pair.p.finish(p)
        d = request(f"d-{req}", [*prompt(100), 7], {"disagg_spec": {"req_id": req}}, **(more if same else {}))
        assert pair.d.load(d) == (100 if same else 0)
        pair.d.finish(d)


def test_found_by_keys(pairs: Pairs) -> None:
    pair = pairs(find=True)
    pair.send("r", prompt(150))
    r = pair.decode_request("", prompt(150), "d")
    assert pair.d.load(r) == 150
    pair.check(r, 150)
    pair.d.finish(r)
    none = pair.decode_request("", prompt(100, 3), "e")
    assert pair.d.load(none) == 0
    pair.d.finish(none)


def test_plain_requests_cost_nothing(pairs: Pairs) -> None:
    pair = pairs()
    for e, r in ((pair.p, request("plain", prompt(100))), (pair.d, request("plain", prompt(100)))):
        assert e.matched(r) == (0, False) and e.matched(r) == (0, False)
        e.step()
        assert not e.scheduler._sending and not e.scheduler._receiving
        e.finish(r)
        assert not e.scheduler._ignored


def test_params_that_cannot_be_used(pairs: Pairs) -> None:
    pair = pairs()
    for spec in ({}, {"req_id": 3}, {"req_id": "x", "receiver_host": "h"}, {"req_id": "x", "receiver_host": "h", "receiver_alloc_port": ["7"]}, "text"):
        r = request("p", prompt(10), {"disagg_spec": spec})
        assert pair.p.matched(r) == (0, False)
        pair.p.finish(r)
    embeddings = request("p", None, pair.spec("r"))  # type: ignore[arg-type]
    assert pair.p.matched(embeddings) == (0, False)
    pair.p.finish(embeddings)
    with pytest.raises(ValueError, match="1 receiver_alloc_port and 0 receiver_init_port for 2 ranks"):
        Spec.of({"disagg_spec": {"req_id": "x", "receiver_host": "h", "receiver_alloc_port": 7400}}, 2)


def test_the_prefill_agent_dies(pairs: Pairs) -> None:
    pair = pairs(staging=2, chunk=32)
    r = pair.prefill_request("r", prompt(200))
    pair.p.admitted(r)
    pair.p.step({"p-r": (r, 0, 100)})
    pair.senders[0].kill()
    pair.p.step({"p-r": (r, 100, 100)})
    pair.p.finish(r)
    d = pair.decode_request("r", prompt(200))
    assert pair.d.admitted(d) == (0, False)
    pair.d.finish(d)
    again = pair.prefill_request("again", prompt(50))
    assert pair.p.admitted(again) == (0, False)  # computed without a transfer
    pair.p.prefill(again)
    again.output_token_ids = [7]
    assert pair.p.finish(again)["failed"]["code"] == "peer_lost"  # and its proxy is told


def test_a_prompt_whose_agent_was_lost_is_given_up(pairs: Pairs, agents: Any) -> None:
    """The prefill agent is killed after it has accepted a prompt and before the receiver has heard of it: the next agent tells the proxy."""
    pair = pairs()
    r = pair.prefill_request("r", prompt(100))
    r.kv_transfer_params["disagg_spec"]["berth_proxy"] = True
    old, receiver = pair.senders[0], pair.receivers[0].process
    receiver.send_signal(signal.SIGSTOP)  # it takes the connection and says nothing: nothing of the prompt goes out
    try:
        assert pair.p.matched(r) == (None, False)
        eventually(lambda: [q["id"] for q in old.status()["requests"]] == ["r"], "the agent has it")
        old.kill()
    finally:
        receiver.send_signal(signal.SIGCONT)
    assert pair.p.admitted(r) == (0, False)  # computed without a transfer
    with zmq.Context() as context, context.socket(zmq.PULL) as words:
        words.setsockopt(zmq.LINGER, 0)
        port = words.bind_to_random_port("tcp://127.0.0.1")
        config = (agents.folder / f"{old.log.stem}.yaml").read_text()
        config = config.replace("pd_skip_proxy_notification: true", f"pd_proxy_host: 127.0.0.1\npd_proxy_port: {port}")
        pair.senders[0] = agents.run(config, old.log.stem, old.socket, old.alloc_port, old.init_port)
        assert words.poll(1000 * common.WAIT), "the proxy is told"
        word = msgspec.msgpack.decode(words.recv())
        assert {k: word[k] for k in ("type", "req_id", "ending", "reason")} == {"type": "Ending", "req_id": "r", "ending": "failed", "reason": "peer_lost"}
        pair.p.prefill(r)
        r.output_token_ids = [7]
        answer = pair.p.finish(r)
        assert answer["first_tok"] == 7 and answer["failed"]["code"] == "peer_lost"
    eventually(lambda: not pair.p.scheduler._given_up, "nothing of it is left")


def test_an_agent_comes_back(pairs: Pairs, agents: Any) -> None:
    pair = pairs()
    old = pair.receivers[0]
    old.kill()
    eventually(lambda: isinstance(pair.d.workers[0]._links._clients[0], AgentError), "the loss is seen")
    agents.run((agents.folder / f"{old.log.stem}.yaml").read_text(), old.log.stem, old.socket, old.alloc_port, old.init_port)
    for e in (pair.d.scheduler, pair.d.workers[0]):
        eventually(lambda e=e: not isinstance(e._links._clients[0], AgentError), "connected again")
    pair.receivers[0] = agents.started[-1]
    eventually(lambda: pair.send("r", prompt(100)) or pair.d.load(pair.decode_request("r", prompt(100))) == 100, "a prompt travels")


def test_start_is_refused(agents: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, size = "kv_shape: [3, 2, 64, 2, 32]\nkv_dtype: float\n", 2 * 3 * 64 * 64 * 4
    sender = agents.start("sender", 4, shape=shape, slot_bytes=size)
    receiver = agents.start("receiver", 4, shape=shape, slot_bytes=size)
    nobody = type(sender)(sender.process, str(tmp_path / "none.sock"), 0, 0, sender.log)
    for agent, options, words in [
        (nobody, dict(sends=True), ["none.sock", "No such file"]),
        (sender, dict(receives=True), ["it is no receiver", "kv_role"]),
        (receiver, dict(sends=True), ["it is no sender", "kv_role"]),
        (receiver, dict(receives=True, max_model_len=300), ["holds 256 tokens (4 slots of 64)", "max_model_len is 300"]),
        (receiver, dict(receives=True, chunk=32), ["slot_bytes is 98304 at the agent, 49152 at the engine"]),
    ]:
        with pytest.raises(AgentError) as e:
            Engine1([agent], **options)
        assert all(w in str(e.value) for w in words), str(e.value)
    with monkeypatch.context() as m, pytest.raises(AgentError, match="version is 2 to 2 at the engine, 1 to 1 at the agent"):
        m.setattr("berth_kv._dial.VERSION", 2)
        Engine1([sender], sends=True)
    first = Engine1([sender], sends=True)
    try:
        with pytest.raises(AgentError, match="holds this agent") as e:
            Engine1([sender], sends=True)
        assert first.engine.engine_id in str(e.value)
    finally:
        first.close()


def test_settings() -> None:
    class Config:
        kv_connector_extra_config: Any = None

    c = Config()
    with pytest.raises(ValueError, match="berth_socket is missing"):
        Settings.of(c)
    c.kv_connector_extra_config = {"berth_socket": "x", "chunk_token": 1, "find": 1, "admit_ahead": 0, "wait_timeout": "1"}
    with pytest.raises(ValueError) as e:
        Settings.of(c)
    for words in ("chunk_token is not known; known are berth_socket, chunk_tokens", "find is 1", "admit_ahead is 0", "wait_timeout is '1'"):
        assert words in str(e.value)
    c.kv_connector_extra_config = {"berth_socket": "/run/{rank}.sock", "wait_timeout": 5}
    s = Settings.of(c)
    assert s.socket(1, 2) == "/run/1.sock" and s.wait_timeout == 5
    with pytest.raises(ValueError, match="for 2 ranks"):
        Settings("/run/a.sock").socket(0, 2)
    with pytest.raises(ValueError, match="1 paths for 2 ranks"):
        Settings(["/run/a.sock"]).socket(0, 2)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(("dtype", "block", "heads", "size"), [
    (torch.float32, 32, 2, 64), (torch.bfloat16, 128, 3, 64), (torch.bfloat16, 16, 1, 32), (torch.float16, 64, 2, 96), (torch.bfloat16, 32, 2, 80),
])  # fmt: skip
def test_cpu_caches(dtype: torch.dtype, block: int, heads: int, size: int, stacked: bool) -> None:
    layers, blocks, n = 3, 12, 5 * block + 3
    whole = torch.zeros(layers, blocks, heads, block, 2 * size, dtype=dtype)
    cache = CPUCache([whole[i] if stacked else whole[i].clone() for i in range(layers)])
    assert (cache._stack is not None) == stacked
    table = [7, 3, 11, 1, 4, 9]
    kv = torch.randn(2, layers, n, heads * size).to(dtype)
    cache.scatter(table, 0, n, kv)
    untouched = [t[[0, 2, 5, 6, 8, 10]] for t in cache._tensors]
    assert all(u.eq(0).all() for u in untouched)
    for views in (cache._views, [None, None]):  # by views, and by index
        cache._views = list(views)
        for a, z in [(0, n), (0, 1), (block - 1, block + 1), (5, 5 + 2 * block), (n - 3, n), (block, 2 * block)]:
            out = torch.empty(2, layers, z - a, heads * size, dtype=dtype)
            cache.gather(table, a, z, out)
            assert torch.equal(out, kv[:, :, a:z])
    patch = torch.randn(2, layers, 2, heads * size).to(dtype)
    cache.scatter(table, block - 1, block + 1, patch)
    kv[:, :, block - 1 : block + 1] = patch
    out = torch.empty_like(kv)
    cache.gather(table, 0, n, out)
    assert torch.equal(out, kv)


def test_token_caches() -> None:
    """The indexing of GPU layouts, on host memory: K and V of a token beside each other, and MLA's one vector."""
    layers, blocks, heads, block, size, n = 3, 8, 2, 16, 8, 37
    table = [5, 2, 7]
    for mla in (False, True):
        shape = (blocks, block, size) if mla else (blocks, heads, block, 2 * size)
        tensors = [torch.zeros(shape) for _ in range(layers)]
        cache = TokenCache(tensors, 1 if mla else 2)
        kv = torch.randn(1, layers, n, size) if mla else torch.randn(2, layers, n, heads * size)
        cache.scatter(table, 0, n, kv)
        token = 20  # in the second block, at offset 4
        if mla:
            assert torch.equal(tensors[1][2, 4], kv[0, 1, token])
        else:
            assert torch.equal(tensors[1][2, 1, 4, :size], kv[0, 1, token, size:])
            assert torch.equal(tensors[1][2, 0, 4, size:], kv[1, 1, token, :size])
        assert all(t[[0, 1, 3, 4, 6]].eq(0).all() for t in tensors)
        for a, z in [(0, n), (15, 17), (3, 4)]:
            out = torch.empty_like(kv[:, :, a:z])
            cache.gather(table, a, z, out)
            assert torch.equal(out, kv[:, :, a:z])


def test_strided_views() -> None:
    """Layouts of kernels that this machine may not have."""
    for b, d in [(128, 64), (32, 96), (64, 128)]:
        t, x = torch.arange(b)[:, None], torch.arange(d)[None]
        for places in ((t // 16) * 16 * d + (x // 2) * 32 + (t % 16) * 2 + x % 2, (x // 16) * 16 * b + (t // 2) * 32 + (x % 16) * 2 + t % 2, x * b + t):
            assert strided_view(places) is not None
        shuffled = torch.randperm(b * d, generator=torch.Generator().manual_seed(1)).view(b, d)
        assert strided_view(shuffled) is None
    assert common.LAYOUT.fmt == 1
