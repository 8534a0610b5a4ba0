"""The scheduler side: which prompts are admitted, which KV is ready, and what the workers are told with each step.

vLLM's scheduler never waits here. Each prompt has a coroutine on the links' loop, which sets a state that the scheduler reads:

    sending     waiting ─► granted ─► ready       waiting, and nothing computed, until every rank has its room
                   └──────────┴─────► failed      then it is computed all the same; the decode side computes it as well

    receiving   waiting ─► ready ─► loading ─► over
                   └─────────┴────────────────► over (released)
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from .. import aio
from ..errors import AgentError, DeadlineError
from ..keys import chunks
from .links import Links
from .messages import Compute, Failures, Load, Step
from .settings import Engine, Spec

log = logging.getLogger("vllm.berth")

_BYE = 10.0  # seconds for calls that end something
_COPY = 1.0  # seconds; the copies of a finished prompt take a tenth of it when nothing stops them


class State(enum.Enum):
    WAITING = enum.auto()
    GRANTED = enum.auto()
    READY = enum.auto()
    LOADING = enum.auto()
    FAILED = enum.auto()
    OVER = enum.auto()


class Sending:
    """A prompt whose KV is to be sent."""

    def __init__(self, request_id: str, spec: Spec, prompt: int, hashes: list[str]) -> None:
        self.request_id = request_id
        self.spec = spec
        self.prompt = prompt  # tokens
        self.hashes = hashes
        self.state = State.WAITING
        self.begun = time.monotonic()
        self.counted = False  # among those that wait for their grant; guarded by SchedulerSide's lock
        self.told = False  # the workers know it
        self.announced = 0  # tokens that the workers may send
        self.task: _Task | None = None
        self.failed: dict[str, str] | None = None  # why its KV will not come, for the answer: code and text

    @property
    def receiver(self) -> str:
        return f"{self.spec.host}:{self.spec.alloc_ports[0]}"


class Receiving:
    """A request whose KV may come from elsewhere."""

    def __init__(self, request_id: str, req: str, prompt: list[int], salt: str) -> None:
        self.request_id = request_id
        self.req = req  # at the agents; "" until it is found
        self.prompt = prompt
        self.salt = salt
        self.state = State.WAITING
        self.begun = time.monotonic()
        self.claims: list[aio.Claim] = []  # of each rank
        self.incarnations: list[str] = []
        self.tokens = 0  # that every rank holds of the prompt
        self.task: _Task | None = None


class SchedulerSide:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._settings = engine.settings
        self._keyer = engine.keyer
        self._links = Links(engine, "scheduler", list(range(engine.ranks)))
        self._sending: dict[str, Sending] = {}
        self._receiving: dict[str, Receiving] = {}
        self._ignored: set[str] = set()  # requests without a transfer
        self._freeing: dict[str, float] = {}  # finished prompts whose blocks are still read, and since when
        self._lock = threading.Lock()
        self._waiting: Counter[str] = Counter()  # by receiver: prompts that wait for their grant; guarded by _lock
        self._next = Step()
        self._given_up: set[asyncio.Task[None]] = set()  # of transfers whose agent was lost; the loop's

    def close(self) -> None:
        self._links.close()

    # What vLLM asks.

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` come from elsewhere, and whether asynchronously; (None, False): ask again."""
        rid = request.request_id
        if rid in self._ignored:
            return 0, False
        s, r = self._sending.get(rid), self._receiving.get(rid)
        if s is None and r is None:
            s, r = self._classify(request)
        if s is not None:
            if s.task is None and self._enter(s):
                s.task = _Task(self._links.loop, self._send(s), lambda: self._leave(s))
            return (None, False) if s.state is State.WAITING else (0, False)
        if r is None:
            self._ignored.add(rid)
            return 0, False
        if r.state is State.WAITING:
            if r.task is None:
                r.task = _Task(self._links.loop, self._receive(r))
            return None, False
        if r.state is State.READY:
            if r.tokens > computed:
                return r.tokens - computed, True
            self._drop(r)
        return 0, False

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        r = self._receiving.get(request.request_id)
        if r is None or r.state is not State.READY:
            return
        if not external:
            self._drop(r)
            return
        r.state = State.LOADING
        start = r.tokens - external
        held = [[(c.view.slot, c.tokens) for c in claim] for claim in r.claims]
        self._next.load.append(Load(r.request_id, r.req, r.incarnations, held, start, r.tokens, list(blocks.get_block_ids()[0])))
        if self._settings.timings:
            log.info("berth receive %s: found ready after %.1f ms, %d tokens", r.req, 1000 * (time.monotonic() - r.begun), external)

    def step(self, out: Any) -> Step:
        step, self._next = self._next, Step()
        if not self._sending:
            return step
        for rid in out.preempted_req_ids or ():
            s = self._sending.get(rid)
            if s is not None:
                s.announced = 0
                if s.told:
                    step.preempted.append(rid)
        for new in out.scheduled_new_reqs:
            self._compute(step, out, new.req_id, new.num_computed_tokens)
        cached = out.scheduled_cached_reqs
        for rid, computed in zip(cached.req_ids, cached.num_computed_tokens):
            self._compute(step, out, rid, computed)
        return step

    def _compute(self, step: Step, out: Any, rid: str, computed: int) -> None:
        s = self._sending.get(rid)
        if s is None or s.state is not State.GRANTED:
            return
        ready = min(s.prompt, computed + out.num_scheduled_tokens[rid])
        chunk = self._settings.chunk_tokens
        if ready <= s.announced or (ready < s.prompt and ready // chunk == s.announced // chunk):
            return
        blocks = out.kv_connector_block_state.get_block_ids(rid)[0]
        hashes = [] if s.told else s.hashes
        step.compute.append(Compute(rid, s.spec.req_id, hashes, s.prompt, ready, list(blocks[: chunks(ready, self._engine.block_size)])))
        s.told, s.announced = True, ready

    def output(self, out: Any) -> None:
        for rid in out.finished_sending or ():
            self._freeing.pop(rid, None)
        for rid in out.finished_recving or ():
            r = self._receiving.get(rid)
            if r is not None:
                r.state = State.OVER
        failures = out.kv_connector_worker_meta
        if isinstance(failures, Failures):
            for rid, text in failures.requests.items():
                s = self._sending.get(rid)
                if s is not None:
                    self._stop(s, text)

    def frees_soon(self) -> bool:
        """Whether blocks come back without a preemption: a finished prompt is being copied, and has not been for so long that its receiver
        must have stopped."""
        return bool(self._freeing) and time.monotonic() - max(self._freeing.values()) < _COPY

    def finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        rid = request.request_id
        self._ignored.discard(rid)
        r = self._receiving.pop(rid, None)
        if r is not None and r.state in (State.WAITING, State.READY):
            self._links.loop.call_soon_threadsafe(self._abandon, r)
        delay = False
        s = self._sending.pop(rid, None)
        if s is not None:
            whole = s.announced == s.prompt and s.state in (State.GRANTED, State.READY) and "ABORTED" not in request.status.name
            if not whole:
                self._stop(s, f"the engine's request ended: {request.status.name}")
            if s.told:
                self._next.finished[rid] = not whole
                self._freeing[rid] = time.monotonic()
                delay = True
        params = request.kv_transfer_params or {}
        if params.get("ret_first_tok") and request.output_token_ids:
            answer: dict[str, Any] = {"first_tok": request.output_token_ids[0]}
            if s is not None and s.failed:  # nobody else could tell the proxy, where no receiver has heard of it
                answer["failed"] = s.failed
            return delay, answer
        return delay, None

    # Sending.

    def _classify(self, request: Any) -> tuple[Sending | None, Receiving | None]:
        rid, e = request.request_id, self._engine
        if request.prompt_token_ids is None:  # embeddings have no names
            return None, None
        try:
            spec = Spec.of(request.kv_transfer_params, e.ranks)
        except ValueError as error:
            log.warning("request %s is not transferred: %s", rid, error)
            return None, None
        prompt = list(request.prompt_token_ids)
        if spec is not None and spec.host:
            if not e.sends:
                log.warning("request %s is to be sent, and kv_role says that this engine does not send", rid)
                return None, None
            s = Sending(rid, spec, len(prompt), self._keyer.hashes(prompt, salt(request)))
            self._sending[rid] = s
            return s, None
        if e.receives and (spec is not None or self._settings.find):
            r = Receiving(rid, spec.req_id if spec else "", prompt, salt(request))
            self._receiving[rid] = r
            return None, r
        return None, None

    def _enter(self, s: Sending) -> bool:
        """Whether a prompt may be begun: a few at a time wait at a receiver, the others hold nothing and wait in vLLM's queue."""
        with self._lock:
            if self._waiting[s.receiver] >= self._settings.admit_ahead:
                return False
            self._waiting[s.receiver] += 1
            s.counted = True
            return True

    def _leave(self, s: Sending) -> None:
        with self._lock:
            if s.counted:
                s.counted = False
                self._waiting[s.receiver] -= 1
                if not self._waiting[s.receiver]:
                    del self._waiting[s.receiver]

    def _stop(self, s: Sending, text: str) -> None:
        """End a transfer from the scheduler's thread; its coroutine cancels it at the agents."""
        if s.state in (State.WAITING, State.GRANTED):
            log.info("transfer %s is cancelled: %s", s.spec.req_id, text)
            s.state = State.FAILED
            s.failed = s.failed or {"code": "internal", "text": text[:500]}
            if s.task is not None:
                self._links.loop.call_soon_threadsafe(s.task.cancel)

    async def _send(self, s: Sending) -> None:
        e, spec = self._engine, s.spec
        begun: list[aio.Transfer] = []
        agents: list[aio.Client] = []
        try:
            for rank in range(e.ranks):  # ascending, each after the grant of the one before
                agent = self._links.agent(rank)
                t = await agent.begin(
                    spec.req_id, len(s.hashes), host=spec.host, alloc_port=spec.alloc_ports[rank],
                    init_port=spec.init_ports[rank] if spec.init_ports else None, deadline=self._settings.transfer_timeout,
                    berth_proxy=spec.berth_proxy,
                )  # fmt: skip
                begun.append(t)
                agents.append(agent)
                await self._first([t.granted], [b.ended for b in begun[:-1]], "granted")
            granted = time.monotonic()
            self._leave(s)
            if s.state is State.WAITING:
                s.state = State.GRANTED
            for t in begun:
                await self._first([t.ended], [b.ended for b in begun], "ended")
            s.state = State.READY
            if self._settings.timings:
                log.info("berth send %s: admission %.1f ms, ready at %.4f", spec.req_id, 1000 * (granted - s.begun), time.monotonic())
        except (AgentError, asyncio.CancelledError) as error:
            if s.state is not State.FAILED:
                level = logging.INFO if isinstance(error, AgentError) and error.code == "cancelled" else logging.WARNING  # its client has left
                log.log(level, "the KV of %s is not sent: %s", spec.req_id, error or "the engine is closing")
                s.state = State.FAILED
            if isinstance(error, AgentError):
                s.failed = {"code": error.code, "text": error.text[:500]}
            text = str(error) or "the engine cancelled it"
            bye = [asyncio.ensure_future(t.cancel(text=text[:500], timeout=_BYE)) for t in begun]
            if bye:
                await asyncio.wait(bye)
            for rank, f in enumerate(bye):
                if f.exception() and agents[rank].lost and spec.berth_proxy and not self._links.closing:
                    task = asyncio.create_task(self._give_up(spec, rank, agents[rank].info.incarnation))
                    self._given_up.add(task)
                    task.add_done_callback(self._given_up.discard)

    async def _give_up(self, spec: Spec, rank: int, lost: str) -> None:
        """Through the next agent, say of a transfer whose agent was lost that nothing will come of it: the lost one may not have told the
        receiver of it, and the proxy waits for the receiver's word. At most as many are given up as were being sent at the loss."""
        end = time.monotonic() + self._settings.transfer_timeout
        while True:
            try:
                agent = await asyncio.wait_for(self._links.connected(rank), end - time.monotonic())
                await agent.give_up(
                    spec.req_id, lost, host=spec.host, alloc_port=spec.alloc_ports[rank],
                    init_port=spec.init_ports[rank] if spec.init_ports else None, timeout=_BYE,
                )  # fmt: skip
                return
            except (AgentError, asyncio.TimeoutError) as error:
                if not isinstance(error, AgentError) or not agent.lost:  # one that was lost too has a successor
                    log.warning("nobody was told that the KV of %s is lost: %s", spec.req_id, error)
                    return

    async def _first(self, wanted: list[Any], watched: list[Any], what: str) -> None:
        """Wait for one of `wanted`; one of `watched` that ends badly raises its error first."""
        watched = [w for w in watched if not w.done() or w.exception() is not None]
        while True:
            done, _ = await asyncio.wait({*wanted, *watched}, timeout=self._settings.transfer_timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise DeadlineError("deadline", f"not {what} within {self._settings.transfer_timeout:g} s")
            for f in done:
                f.result()
            if any(w.done() for w in wanted):
                return
            watched = [w for w in watched if not w.done()]

    # Receiving.

    async def _receive(self, r: Receiving) -> None:
        by, ranks = r.request_id, range(self._engine.ranks)
        try:
            if r.req:
                await _all(self._links.agent(rank).wait(r.req, timeout=self._settings.wait_timeout) for rank in ranks)
            elif not await self._find(r):
                r.state = State.OVER
                return
            r.incarnations = [self._links.agent(rank).info.incarnation for rank in ranks]
            r.claims = await _all(self._links.agent(rank).claim(by, r.req) for rank in ranks)
            r.tokens = min(self._prefix(rank, r, claim) for rank, claim in enumerate(r.claims))
            if not r.tokens:
                raise AgentError("bad_request", "its chunks are not a prefix of this prompt")
            r.state = State.READY
        except (AgentError, asyncio.CancelledError) as error:
            if r.req:
                await asyncio.shield(self._release(by, r.req))
            if isinstance(error, AgentError):
                level = logging.INFO if error.code == "cancelled" else logging.WARNING
                log.log(level, "the KV of %s is not loaded, its prompt is computed here: %s", r.req, error)
            r.state = State.OVER

    async def _find(self, r: Receiving) -> bool:
        """Find a request for a prompt that names none; the same at every rank. LMCache's proxy appends the first token of the answer to
        the prompt, so the prompt without its last token is tried too."""
        found: set[str] = set()
        best = ""
        for rank in range(self._engine.ranks):
            best, most = "", 0
            for tokens in (r.prompt[:-1], r.prompt):
                req, matched = await self._links.agent(rank).find(r.request_id, self._keyer.keys(rank, tokens, r.salt)) if tokens else (None, 0)
                if req:
                    found.add(req)
                    if matched > most:
                        best, most = req, matched
            if not best:
                break
        for req in found:
            if len(found) > 1 and req != best or not best:
                await self._release(r.request_id, req)
        r.req = best
        return bool(best)

    def _prefix(self, rank: int, r: Receiving, claim: aio.Claim) -> int:
        """Tokens of the claimed chunks that are a prefix of the prompt."""
        size, tokens = self._settings.chunk_tokens, 0
        whole = self._keyer.hashes(r.prompt, r.salt)
        for i, c in enumerate(claim):
            end = tokens + c.tokens
            if c.index != i or tokens != i * size or end > len(r.prompt):
                break
            partial = c.tokens < size and end < len(r.prompt)
            chunk_hash = self._keyer.hashes(r.prompt[:end], r.salt)[i] if partial else whole[i]
            if c.key != self._keyer.key(rank, chunk_hash):
                break
            tokens = end
        return tokens

    def _abandon(self, r: Receiving) -> None:
        """Nobody wants it any more. On the loop, where it becomes ready."""
        if r.state is State.READY:
            self._drop(r)
        elif r.task is not None:
            r.task.cancel()

    def _drop(self, r: Receiving) -> None:
        """What is ready is not needed."""
        r.state = State.OVER
        self._links.run(self._release(r.request_id, r.req))

    async def _release(self, by: str, req: str) -> None:
        for rank in range(self._engine.ranks):
            with contextlib.suppress(AgentError):
                await self._links.agent(rank).release(by, req, timeout=_BYE)


class _Task:
    """A task on a loop, started from another thread; cancel is called on the loop. done is called at the end, even if it never ran."""

    def __init__(self, loop: asyncio.AbstractEventLoop, c: Coroutine[Any, Any, None], done: Callable[[], None] = lambda: None) -> None:
        self._task: asyncio.Task[None] | None = None
        loop.call_soon_threadsafe(self._begin, loop, c, done)

    def _begin(self, loop: asyncio.AbstractEventLoop, c: Coroutine[Any, Any, None], done: Callable[[], None]) -> None:
        self._task = loop.create_task(c)
        self._task.add_done_callback(lambda _: done())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def _all(calls: Any) -> list[Any]:
    """Await all of them; the first error is raised when each has its result."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def salt(request: Any) -> str:
    """What changes a prompt's KV beside its tokens."""
    parts = []
    if request.lora_request is not None:
        parts.append(f"lora={request.lora_request.lora_name}")
    if request.cache_salt:
        parts.append(f"salt={request.cache_salt}")
    parts += [f"mm={f.identifier}" for f in request.mm_features or ()]
    return "\n".join(parts)
