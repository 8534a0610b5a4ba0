"""The synchronous client against real agents."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import LAYOUT, SHAPE, WAIT, Agent, Agents, empty, until

import berth_kv
from berth_kv import AgentError, DeadlineError, Keyer, Staged

Pair = tuple[Agent, Agent]
KEYER = Keyer("m", 1, "bfloat16", 16)


def send(sender: berth_kv.Client, port: int, req: str, prompt: list[int], seed: int = 0) -> tuple[berth_kv.Transfer, list[np.ndarray]]:
    """Send a prompt's chunks of random bits as one batch, and return them."""
    total = berth_kv.chunks(len(prompt), 16)
    t = sender.begin(req, total, host="127.0.0.1", alloc_port=port, deadline=WAIT)
    t.wait_granted(timeout=WAIT)
    random, sent = np.random.default_rng(seed), []
    with t.stage(total) as batch:
        chunks = []
        for i, (slot, key) in enumerate(zip(batch, KEYER.keys(0, prompt))):
            tokens = min(16, len(prompt) - 16 * i)
            view = slot.first(tokens).numpy()
            view[...] = random.integers(0, 1 << 16, view.shape, np.uint16)
            sent.append(view.copy())
            chunks.append(Staged(i, key, slot, tokens))
        batch.submit(chunks, end=total)
    return t, sent


def pause(agent: Agent) -> None:
    os.kill(agent.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, agent.process.pid, os.WSTOPPED)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 50])
def test_bytes_arrive(pair: Pair, tokens: int) -> None:
    sender, receiver = pair
    prompt = list(range(100, 100 + tokens))
    with berth_kv.connect(sender.socket, LAYOUT) as s, berth_kv.connect(receiver.socket, LAYOUT) as r:
        t, sent = send(s, receiver.alloc_port, "one", prompt)
        r.wait("one", timeout=WAIT)
        t.wait_ended(timeout=WAIT)
        with r.claim("mine", "one") as claimed:
            assert [c.index for c in claimed] == list(range(len(sent)))
            assert [c.key for c in claimed] == KEYER.keys(0, prompt)
            assert sum(c.tokens for c in claimed) == tokens
            for c, want in zip(claimed, sent):
                assert c.memory.readonly and c.memory.nbytes == want.nbytes
                assert c.numpy().shape == want.shape and (c.numpy() == want).all()
                assert bytes(c.memory) == want.tobytes()


def test_views_are_the_pool(pair: Pair) -> None:
    sender, receiver = pair
    with berth_kv.connect(sender.socket, LAYOUT) as s, berth_kv.connect(receiver.socket, LAYOUT) as r:
        s.staging.touch()
        t = s.begin("r", 1, host="127.0.0.1", alloc_port=receiver.alloc_port)
        t.wait_granted()
        with t.stage(1) as (slot,):
            assert isinstance(slot, berth_kv.View)
            slot.numpy()[...] = 7
            assert slot.memory[0] == 7 and not slot.memory.readonly
            slot.memory[:2] = b"\x39\x30"
            assert slot.numpy().reshape(-1)[0] == 12345
            assert slot.numpy(np.uint8).shape == (LAYOUT.slot_bytes,)
            with pytest.raises(ValueError, match="staging slot 8 of 8"):
                s.staging.view(8)
            with pytest.raises(ValueError, match="17 tokens in a chunk of 16"):
                s.staging.view(0, 17)
        with pytest.raises(ValueError, match="read-only"):
            r.receive.view(0).numpy()[...] = 1
        t.cancel()
        kept = r.receive.view(3).numpy()
    assert kept.sum() == 0  # the mapping lives as long as a view of it
    del kept, slot


def test_grant_brings_slots_and_the_batch_gives_back(pair: Pair) -> None:
    sender, receiver = pair
    with berth_kv.connect(sender.socket, LAYOUT) as s:
        t = s.begin("r", 2, host="127.0.0.1", alloc_port=receiver.alloc_port, stage=2)
        with t.wait_granted() as batch:
            assert len(batch) == 2
            assert sender.status()["staging"]["staged"] == 2
            with pytest.raises(AgentError) as e:
                t.stage(4, timeout=WAIT)
            assert e.value.code == "holding"
        assert sender.status()["staging"]["free"] == 8
        t.cancel()
        with pytest.raises(AgentError) as ended:
            t.wait_ended()
        assert ended.value.code == "cancelled"


def test_giving_up(pair: Pair) -> None:
    """What an engine says through the next agent of a request whose agent was lost."""
    sender, receiver = pair
    with berth_kv.connect(sender.socket, LAYOUT) as s, berth_kv.connect(receiver.socket, LAYOUT) as r:
        send(s, receiver.alloc_port, "first", [1])[0].wait_ended(timeout=WAIT)  # sender and receiver know each other
        r.claim("mine", "first").release()
        s.give_up("r", s.info.incarnation, host="127.0.0.1", alloc_port=receiver.alloc_port)  # the same agent: it knows
        with pytest.raises(DeadlineError):
            r.wait("r", timeout=0.05)
        s.give_up("r", "another", host="127.0.0.1", alloc_port=receiver.alloc_port)
        with pytest.raises(AgentError) as e:
            r.wait("r", timeout=WAIT)
        assert (e.value.code, e.value.text) == ("peer_lost", "its sender's agent was lost")


def test_errors_have_the_agents_words(pair: Pair) -> None:
    sender, receiver = pair
    with berth_kv.connect(sender.socket, LAYOUT) as s, berth_kv.connect(receiver.socket, LAYOUT) as r:
        with pytest.raises(AgentError) as too_large:
            s.begin("big", 9, host="127.0.0.1", alloc_port=receiver.alloc_port).wait_granted(timeout=WAIT)
        assert too_large.value.code == "too_large" and "9" in too_large.value.text and "8" in too_large.value.text

        t = s.begin("r", 1, host="127.0.0.1", alloc_port=receiver.alloc_port)
        with pytest.raises(AgentError) as twice:
            s.begin("r", 1, host="127.0.0.1", alloc_port=receiver.alloc_port)
        assert twice.value.code == "bad_request"
        t.wait_granted()
        with pytest.raises(AgentError) as most:
            t.stage(s.info.max_stage + 1)
        assert most.value.code == "too_large" and str(s.info.max_stage) in most.value.text
        with pytest.raises(AgentError) as early:
            r.claim("mine", "r")
        assert early.value.code == "not_granted"
        with pytest.raises(DeadlineError) as late:
            r.wait("r", timeout=0.05)
        assert late.value.code == "deadline" and isinstance(late.value, TimeoutError)
        with pytest.raises(AgentError) as tools_only:
            s.drain()
        assert tools_only.value.code in ("bad_request", "unsupported")
        assert t.cancel(text="enough") == "cancelled"
        with pytest.raises(AgentError) as ended:
            t.wait_ended(timeout=WAIT)
        assert ended.value.code == "cancelled"
        with pytest.raises(AgentError) as gone:
            r.wait("r", timeout=WAIT)
        assert gone.value.code == "cancelled" and "enough" in gone.value.text
    with pytest.raises(AgentError, match="closed"):
        s.cancel("r")


def test_a_waiting_prompt_is_granted_when_room_comes(pair: Pair) -> None:
    sender, receiver = pair
    with berth_kv.connect(sender.socket, LAYOUT) as s:
        first = s.begin("first", 6, host="127.0.0.1", alloc_port=receiver.alloc_port)
        first.wait_granted()
        second = s.begin("second", 6, host="127.0.0.1", alloc_port=receiver.alloc_port)
        with pytest.raises(DeadlineError, match="'second' was not granted within 0.05 s"):
            second.wait_granted(timeout=0.05)
        first.cancel()
        assert second.wait_granted(timeout=WAIT)[:] == []
        second.cancel()


def test_find_by_keys_and_exclusive_claims(pair: Pair) -> None:
    sender, receiver = pair
    long, short = list(range(40)), list(range(20))
    with berth_kv.connect(sender.socket, LAYOUT) as s, berth_kv.connect(receiver.socket, LAYOUT, engine_id="e") as r:
        send(s, receiver.alloc_port, "long", long)[0].wait_ended()
        send(s, receiver.alloc_port, "short", short)[0].wait_ended()
        assert r.find("a", KEYER.keys(0, long)) == ("long", 3)
        assert r.find("a", KEYER.keys(0, long)) == ("long", 3)  # a repeat is the same
        with pytest.raises(AgentError) as other:
            r.claim("b", "long")
        assert other.value.code == "not_owner"
        assert r.find("c", KEYER.keys(0, [7, 7])) == (None, 0)
        assert r.find("b", KEYER.keys(0, long))[0] == "short"
        with berth_kv.connect(receiver.socket, LAYOUT, engine_id="e") as worker:  # another process of the engine may release
            claimed = r.claim("a", "long")
            assert len(claimed) == 3
            worker.release("a", "long", [0])
            worker.release("a", "long")
        r.release("b", "short")
        with pytest.raises(AgentError) as freed:
            r.claim("d", "short")
        assert freed.value.code == "ended"


def test_a_call_given_up_leaves_nothing(pair: Pair) -> None:
    sender, receiver = pair
    with berth_kv.connect(sender.socket, LAYOUT, engine_id="e") as s:
        t = s.begin("r", 8, host="127.0.0.1", alloc_port=receiver.alloc_port)
        t.wait_granted()
        held = [t.stage(4), t.stage(2, timeout=None)]
        with pytest.raises(AgentError) as busy:
            t.stage(1, timeout=None)
        assert busy.value.code == "busy"
        for batch in held:
            batch.unstage()
        pause(sender)
        try:
            with pytest.raises(DeadlineError, match="stage was not answered within 0.05 s"):
                s._call("stage", {"req": "r", "n": 4}, 0.05, lambda a: {"op": "unstage", "req": "r", "slots": a["slots"]} if a else None)
            with pytest.raises(DeadlineError):
                s.stage("r", 3, timeout=0.05)
        finally:
            os.kill(sender.process.pid, signal.SIGCONT)
        until(lambda: sender.status()["staging"]["free"] == 8, "all free")
        t.cancel()


@pytest.mark.parametrize("staged", [True, False])
def test_a_killed_engine_leaks_nothing(pair: Pair, staged: bool, tmp_path: Path) -> None:
    sender, receiver = pair
    program = f"""
import sys, berth_kv
from berth_kv import Layout
s = berth_kv.connect({sender.socket!r}, {LAYOUT!r}, engine_id="dies")
t = s.begin("r", 4, host="127.0.0.1", alloc_port={receiver.alloc_port})
t.wait_granted()
if {staged}: batch = t.stage(3)
print("ready", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        assert receiver.status()["pool"]["granted"] == 4
        assert sender.status()["staging"]["staged"] == (3 if staged else 0)
        with pytest.raises(AgentError) as two:
            berth_kv.connect(sender.socket, LAYOUT, engine_id="another")
        assert two.value.code == "busy" and '"dies"' in two.value.text and '"another"' in two.value.text
        process.kill()
    until(lambda: empty(sender.status()) and empty(receiver.status()), "empty")
    with berth_kv.connect(sender.socket, LAYOUT, engine_id="another") as s:
        send(s, receiver.alloc_port, "r2", [1])[0].wait_ended()
    with berth_kv.connect(receiver.socket, LAYOUT) as r:
        r.claim("x", "r2").release()


def test_a_killed_agent_ends_every_wait(pair: Pair) -> None:
    sender, receiver = pair
    with berth_kv.connect(sender.socket, LAYOUT) as s, berth_kv.connect(receiver.socket, LAYOUT) as r:
        t = s.begin("r", 1, host="127.0.0.1", alloc_port=receiver.alloc_port)
        t.wait_granted()
        errors: list[AgentError] = []

        def waiter() -> None:
            with pytest.raises(AgentError) as e:
                r.wait("r", timeout=WAIT)
            errors.append(e.value)

        thread = threading.Thread(target=waiter)
        thread.start()
        receiver.kill()
        thread.join(WAIT)
        assert [e.code for e in errors] == ["peer_lost"]
        assert r.lost and r.lost.code == "peer_lost"
        sender.kill()
        with pytest.raises(AgentError) as ended:
            t.wait_ended(timeout=WAIT)
        assert ended.value.code == "peer_lost"
        with pytest.raises(AgentError, match="peer_lost"):
            t.stage(1)


def test_a_stopped_agent_is_waited_for_no_longer_than_said(pair: Pair) -> None:
    sender, receiver = pair
    with berth_kv.connect(sender.socket, LAYOUT) as s:
        pause(sender)
        try:
            with pytest.raises(DeadlineError, match="begin was not answered within 0.1 s"):
                s.begin("r", 1, host="127.0.0.1", alloc_port=receiver.alloc_port, timeout=0.1)
            with pytest.raises(DeadlineError, match="no answer to hello within 0.1 s"):
                berth_kv.connect(sender.socket, LAYOUT, timeout=0.1)
        finally:
            os.kill(sender.process.pid, signal.SIGCONT)
        # Its late answer cancels the request: the fixture finds nothing left.
        t, _ = send(s, receiver.alloc_port, "other", [5])
        t.wait_ended()
    with berth_kv.connect(receiver.socket, LAYOUT) as r:
        r.claim("x", "other").release()


def test_hello_is_refused_with_both_values(pair: Pair) -> None:
    sender, _ = pair
    for change, words in [
        (dict(layers=5), ["slot_bytes is 8192 at the agent, 10240 at the engine"]),
        (dict(chunk_tokens=32), ["slot_bytes is 8192 at the agent, 16384"]),
        (dict(dtype="half"), ["dtype is bfloat16 at the agent, half at the engine"]),
        (dict(kv_heads=1, head_size=32), []),  # the same bytes in the same order
        (dict(layers=2, kv_heads=4), ["shape is [2 4 16 32] at the agent, [2 2 16 64] at the engine"]),
        (dict(tp_rank=1, tp_size=2), ["rank is 0 at the agent, 1 at the engine"]),
    ]:
        layout = berth_kv.Layout.attention(**(dict(layers=4, kv_heads=2, head_size=16, chunk_tokens=16, dtype="bfloat16") | change))
        if not words:
            berth_kv.connect(sender.socket, layout).close()
            continue
        with pytest.raises(AgentError) as e:
            berth_kv.connect(sender.socket, layout)
        assert e.value.code == "layout_mismatch" and sender.socket in e.value.text
        assert all(w in e.value.text for w in words), e.value.text


def test_connect_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="No such file") as e:
        berth_kv.connect(str(tmp_path / "none.sock"), LAYOUT)
    assert e.value.code == "peer_lost" and "none.sock" in e.value.text
    with pytest.raises(ValueError, match="needs a layout"):
        berth_kv.connect(str(tmp_path / "none.sock"))


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        ({"id": 0, "version": 2, "incarnation": b"", "pools": []}, "unsupported", "it speaks version 2 of the local API, this client 1"),
        ({"id": 0, "error": {"code": "unsupported", "text": "version 1, this agent speaks 2"}}, "unsupported", "this agent speaks 2"),
        ({"id": 0, "version": 1}, "peer_lost", "incarnation"),
        ({"id": 0, "version": 1, "incarnation": b"x", "slot_bytes": 1, "staging_capacity": 1, "receive_capacity": 0, "max_stage": 1,
          "pools": ["staging"]}, "peer_lost", "0 descriptors came for 1 pools"),
        ({"id": 7}, "peer_lost", "no answer to hello"),
        ([1], "peer_lost", "not a map"),
        (b"\xc1", "peer_lost", "not msgpack"),
        (None, "peer_lost", "closed the connection during hello"),
    ],
)  # fmt: skip
def test_an_agent_that_is_none(tmp_path: Path, answer: object, code: str, text: str) -> None:
    import msgspec

    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            conn, _ = listener.accept()
            with conn:
                conn.recv(1 << 16)
                if answer is not None:
                    body = answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer)
                    conn.sendall(len(body).to_bytes(4, "big") + body)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(AgentError) as e:
            berth_kv.connect(path, LAYOUT, timeout=WAIT)
        thread.join()
    assert e.value.code == code and text in e.value.text and path in e.value.text


@pytest.mark.parametrize("garbage", [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\1\x80", b"\0\0\0\5\x81\xa2id\x63", b"\0\0\0\4\x81\xa2id"])
def test_garbage_ends_the_connection(tmp_path: Path, garbage: bytes) -> None:
    import msgspec

    path = str(tmp_path / "s.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            conn, _ = listener.accept()
            with conn:
                conn.recv(1 << 16)
                hello = {"id": 0, "version": 1, "incarnation": b"x", "slot_bytes": 0, "staging_capacity": 0, "receive_capacity": 0, "max_stage": 0, "pools": []}
                body = msgspec.msgpack.encode(hello)
                conn.sendall(len(body).to_bytes(4, "big") + body)
                conn.recv(1 << 16)
                conn.sendall(garbage)
                conn.shutdown(socket.SHUT_WR)
                while conn.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        with berth_kv.connect(path, part="tool", timeout=WAIT) as tool, pytest.raises(AgentError) as e:
            tool.status(timeout=WAIT)
        thread.join()
    assert e.value.code == "peer_lost"


def test_agents_with_both_pools_and_tools(agents: Agents) -> None:
    both = agents.start("both", slots=4)
    with berth_kv.connect(both.socket, LAYOUT) as a:
        assert (a.info.staging_capacity, a.info.receive_capacity, a.info.max_stage) == (4, 4, 2)
        t, sent = send(a, both.alloc_port, "self", [1, 2, 3])
        t.wait_ended()
        with a.claim("x", "self") as (chunk,):
            assert (chunk.numpy() == sent[0]).all()
    with berth_kv.connect(both.socket, part="tool") as tool:
        assert tool.staging is None and tool.receive is None
        with pytest.raises(AgentError) as e:
            tool.find("x", ["k"])
        assert e.value.code in ("bad_request", "unsupported")
        tool.drain()


def test_mla_and_flat_layouts(agents: Agents) -> None:
    mla = berth_kv.Layout.attention(layers=3, kv_heads=1, head_size=24, chunk_tokens=16, dtype="half", mla=True)
    agent = agents.start("both", shape="kv_shape: [3, 1, 16, 1, 24]\nkv_dtype: half\n", slot_bytes=mla.slot_bytes)
    with berth_kv.connect(agent.socket, mla) as a:
        assert a.info.slot_bytes == mla.slot_bytes == 3 * 16 * 24 * 2
    flat = berth_kv.Layout(berth_kv.layout.KV_2TD, "uint8", (16, 64))
    agent = agents.start("both", shape="slot_bytes: 1024\nchunk_size: 16\n", slot_bytes=1024)
    with berth_kv.connect(agent.socket, flat) as a:
        assert a.info.slot_bytes == 1024
    assert SHAPE.startswith("kv_shape: [4, 2, 16, 2, 16]")
