"""The asyncio client against real agents."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from conftest import LAYOUT, WAIT, Agent, until

from berth_kv import AgentError, DeadlineError, Keyer, Staged, aio

Pair = tuple[Agent, Agent]
KEYER = Keyer("m", 1, "bfloat16", 16)


def run(c: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(c, 3 * WAIT))


def test_many_prompts_at_once(pair: Pair) -> None:
    sender, receiver = pair

    async def one(s: aio.Client, r: aio.Client, turn: asyncio.Lock, n: int) -> None:
        req, prompt = f"req-{n}", [n] * (n % 40 + 1)
        keys = KEYER.keys(0, prompt)
        t = await s.begin(req, len(keys), host="127.0.0.1", alloc_port=receiver.alloc_port)
        await t.wait_granted(timeout=2 * WAIT)
        bits = np.random.default_rng(n).integers(0, 1 << 16, (len(keys), LAYOUT.slot_bytes // 2), np.uint16)
        async with turn, await t.stage(len(keys), timeout=WAIT) as batch:
            for slot, row in zip(batch, bits):
                slot.numpy(np.uint16)[...] = row
            await batch.submit([Staged(i, k, slot, min(16, len(prompt) - 16 * i)) for i, (k, slot) in enumerate(zip(keys, batch))], end=len(keys))
        await r.wait(req, timeout=WAIT)
        async with await r.claim("by-" + req, req) as claimed:
            for c, row in zip(claimed, bits):
                assert bytes(c.memory) == row.tobytes()[: c.memory.nbytes]
        await t.wait_ended(timeout=WAIT)

    async def main() -> None:
        async with aio.connect(sender.socket, LAYOUT) as s, aio.connect(receiver.socket, LAYOUT) as r:
            turn = asyncio.Lock()
            await asyncio.gather(*(one(s, r, turn, n) for n in range(40)))

    run(main())


def test_cancelled_calls_leave_nothing(pair: Pair) -> None:
    sender, receiver = pair

    async def main() -> None:
        async with aio.connect(sender.socket, LAYOUT) as s, aio.connect(receiver.socket, LAYOUT) as r:
            t = await s.begin("r", 8, host="127.0.0.1", alloc_port=receiver.alloc_port)
            await t.wait_granted()
            calls = [lambda: r.wait("r", timeout=60), lambda: t.stage(2), lambda: t.stage(4), lambda: s.begin("q", 1, host="127.0.0.1", alloc_port=receiver.alloc_port)]
            for call in calls:
                task = asyncio.ensure_future(call())
                await asyncio.sleep(0)  # it has sent its call
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            with pytest.raises(DeadlineError):
                await r.wait("r", timeout=0.05)
            with pytest.raises(DeadlineError):
                await t.wait_ended(timeout=0.05)
            await t.cancel()
            with pytest.raises(AgentError, match="cancelled"):
                await t.wait_ended()
            # The connections stay: what was given up must come back by itself.
            await asyncio.to_thread(until, lambda: sender.status()["staging"]["free"] == 8, "all free")
            assert s.lost is None and r.lost is None

    run(main())


def test_cancelled_when_the_answer_is_there(pair: Pair) -> None:
    """The answer has come and its caller is cancelled before it runs again: what it brought goes back."""
    sender, receiver = pair

    async def interrupted(c: Coroutine[Any, Any, Any], client: aio.Client) -> None:
        task = asyncio.ensure_future(c)
        await asyncio.sleep(0)
        (call,) = client._core._calls.values()
        call.future.add_done_callback(lambda _: task.cancel())  # after that which wakes the caller
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.future.done() and call.future.exception() is None

    async def main() -> None:
        async with aio.connect(sender.socket, LAYOUT) as s, aio.connect(receiver.socket, LAYOUT) as r:
            await interrupted(s.begin("a", 8, host="127.0.0.1", alloc_port=receiver.alloc_port), s)
            t = await s.begin("b", 8, host="127.0.0.1", alloc_port=receiver.alloc_port)
            await t.wait_granted(timeout=WAIT)  # a holds nothing
            await interrupted(t.stage(4), s)
            await asyncio.to_thread(until, lambda: sender.status()["staging"]["free"] == 8, "all free")
            await t.cancel()
            t = await s.begin("c", 0, host="127.0.0.1", alloc_port=receiver.alloc_port)
            await t.wait_ended(timeout=WAIT)
            await interrupted(r.claim("x", "c"), r)

    run(main())


def test_loss(pair: Pair) -> None:
    sender, receiver = pair

    async def main() -> None:
        async with aio.connect(sender.socket, LAYOUT) as s, aio.connect(receiver.socket, LAYOUT) as r:
            t = await s.begin("r", 1, host="127.0.0.1", alloc_port=receiver.alloc_port)
            await t.wait_granted()
            waiting = asyncio.ensure_future(r.wait("r", timeout=WAIT))
            await asyncio.sleep(0)
            receiver.kill()
            with pytest.raises(AgentError, match="peer_lost"):
                await waiting
            assert (await r.gone).code == "peer_lost"
            sender.kill()
            with pytest.raises(AgentError, match="peer_lost"):
                await t.wait_ended(timeout=WAIT)
            with pytest.raises(AgentError, match="peer_lost"):
                await s.stage("r", 1)
        with pytest.raises(AgentError, match="peer_lost"):
            async with aio.connect(receiver.socket, LAYOUT):
                pass

    run(main())


def test_tool(pair: Pair) -> None:
    sender, _ = pair

    async def main() -> None:
        async with aio.connect(sender.socket, part="tool") as tool:
            assert (await tool.status())["staging"]["capacity"] == 8
            assert await tool.cancel("unknown") == "cancelled"

    run(main())
