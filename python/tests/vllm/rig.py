"""Both sides of the connector without vLLM's engine: its hooks are called in vLLM's order, over real caches and real agents."""

from __future__ import annotations

import importlib.util
import pathlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from berth_kv import Keyer, Layout
from berth_kv.vllm.messages import Failures, Step
from berth_kv.vllm.scheduler import SchedulerSide
from berth_kv.vllm.settings import Engine, Settings
from berth_kv.vllm.worker import WorkerSide

_spec = importlib.util.spec_from_file_location("agents_conftest", pathlib.Path(__file__).parents[1] / "conftest.py")
assert _spec and _spec.loader
common = importlib.util.module_from_spec(_spec)
import sys  # noqa: E402

sys.modules["agents_conftest"] = common
_spec.loader.exec_module(common)
agents = common.agents

LAYERS, HEADS, SIZE, BLOCK, BLOCKS = 3, 2, 32, 32, 40
WAIT = 30.0


def truth(prompt: list[int], rank: int) -> torch.Tensor:
    """The KV of a prompt: [2, layers, tokens, hidden]."""
    g = torch.Generator().manual_seed(hash((tuple(prompt), rank)) & 0x7FFFFFFF)
    return torch.rand(2, LAYERS, len(prompt), HEADS * SIZE, generator=g)


class Engine1:
    """One engine: a scheduler side, a worker side for each rank, and their caches."""

    def __init__(self, agents: list[Any], *, sends: bool = False, receives: bool = False, chunk: int = 64, max_model_len: int = 256, **settings: Any) -> None:
        ranks = len(agents)
        layout = Layout.attention(layers=LAYERS, kv_heads=HEADS, head_size=SIZE, chunk_tokens=chunk, dtype="float", tp_size=ranks)
        s = Settings(berth_socket=[a.socket for a in agents], chunk_tokens=chunk, **{"connect_timeout": 1.0, "wait_timeout": WAIT, **settings})
        self.engine = Engine(s, f"engine-{id(self)}", ranks, sends, receives, max_model_len, BLOCK, "auto", layout, Keyer("m", ranks, "float", chunk))
        self.caches = [torch.zeros(LAYERS, BLOCKS, HEADS, BLOCK, 2 * SIZE) for _ in range(ranks)]
        self.workers: list[WorkerSide] = []
        try:
            for rank, cache in enumerate(self.caches):
                self.workers.append(WorkerSide(self.engine, rank, {f"model.layers.{i}.attn": cache[i] for i in range(LAYERS)}))
            self.scheduler = SchedulerSide(self.engine)
        except BaseException:
            for w in self.workers:
                w.close()
            raise
        self.free = list(range(1, BLOCKS))
        self.tables: dict[str, list[int]] = {}
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.invalid: set[int] = set()

    def close(self) -> None:
        self.scheduler.close()
        for w in self.workers:
            w.close()

    def take(self, request_id: str, tokens: int) -> None:
        """Blocks for so many tokens."""
        table = self.tables.setdefault(request_id, [])
        while len(table) * BLOCK < tokens:
            table.append(self.free.pop(0))

    def give(self, request_id: str) -> None:
        """Free a request's blocks; whoever gets them next writes something else."""
        table = self.tables.pop(request_id)
        for cache in self.caches:
            cache[:, table] = -1.0
        self.free += table

    def step(self, work: dict[str, tuple[Any, int, int]] | None = None, preempted: list[str] | None = None) -> None:
        """One step: work is request id → (request, computed, tokens)."""
        work = work or {}
        out = SimpleNamespace(
            preempted_req_ids=set(preempted or ()), scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=list(work), num_computed_tokens=[c for _, c, _ in work.values()]),
            num_scheduled_tokens={rid: n for rid, (_, _, n) in work.items()},
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda rid: (self.tables[rid],)),
        )  # fmt: skip
        for rid, (_, computed, n) in work.items():
            self.take(rid, computed + n)
        step: Step = pickle.loads(pickle.dumps(self.scheduler.step(out)))
        failures: list[Failures] = []
        sent, received = [], []
        for rank, w in enumerate(self.workers):
            if step.preempted:
                w.preempted(step.preempted)
        for rid in preempted or ():
            self.give(rid)  # from here on the blocks are others'
        for rank, w in enumerate(self.workers):
            for rid, (request, computed, n) in work.items():
                kv = truth(request.prompt_token_ids, rank)[:, :, computed : computed + n]
                w._cache.scatter(self.tables[rid], computed, computed + n, kv)
            for load in step.load:
                w.load(load)
            if step:
                w.computed(step)
            a, b = w.done()
            sent.append(a or set())
            received.append(b or set())
            self.invalid |= w.invalid()
            if f := w.failures():
                failures.append(f)
        sending = self._count(sent, self.sent)
        done = self._count(received, self.received)
        meta = None
        for f in failures:
            meta = f if meta is None else meta.aggregate(f)
        self.scheduler.output(SimpleNamespace(finished_sending=sending, finished_recving=done, kv_connector_worker_meta=meta))

    def _count(self, named: list[set[str]], into: set[str]) -> set[str]:
        """Whom every rank has named."""
        counts = self.__dict__.setdefault("_counts", {})
        done = set()
        for rid in (r for s in named for r in s):
            counts[rid] = counts.get(rid, 0) + 1
            assert counts[rid] <= len(self.workers), f"{rid} was reported too often"
            if counts[rid] == len(self.workers):
                done.add(rid)
        into |= done
        return done

    def matched(self, request: Any, computed: int = 0) -> tuple[int | None, bool]:
        return self.scheduler.matched(request, computed)

    def admitted(self, request: Any, computed: int = 0) -> tuple[int | None, bool]:
        """Ask until the answer is not None."""
        out: list[tuple[int | None, bool]] = []
        eventually(lambda: out.append(self.matched(request, computed)) or out[-1][0] is not None, f"{request.request_id} may start")
        return out[-1]

    def prefill(self, request: Any, most: int = 1 << 20, computed: int = 0) -> None:
        """Compute a prompt in steps of at most `most` tokens."""
        total = len(request.prompt_token_ids)
        while computed < total:
            n = min(most, total - computed)
            self.step({request.request_id: (request, computed, n)})
            computed += n

    def finish(self, request: Any, status: str = "FINISHED_LENGTH_CAPPED") -> dict[str, Any] | None:
        """End a request, and wait until its blocks may be freed."""
        request.status = SimpleNamespace(name=status)
        delay, params = self.scheduler.finished(request)
        if delay:
            eventually(lambda: self.step() or request.request_id in self.sent, f"{request.request_id} was read")
        if request.request_id in self.tables:
            self.give(request.request_id)
        return params

    def load(self, request: Any, computed: int = 0) -> int:
        """Load what is ready; returns how many tokens came."""
        n, asynchronous = self.admitted(request, computed)
        assert n is not None and asynchronous == bool(n)  # vLLM ends at an asynchronous load of nothing
        if not n:
            return 0
        self.allocate(request, computed + n, n)
        eventually(lambda: self.step() or request.request_id in self.received, f"{request.request_id} was received")
        return n

    def allocate(self, request: Any, tokens: int, external: int) -> None:
        self.take(request.request_id, tokens)
        blocks = SimpleNamespace(get_block_ids=lambda: (self.tables[request.request_id],))
        self.scheduler.allocated(request, blocks, external)

    def cached(self, request: Any, start: int, end: int, rank: int = 0) -> torch.Tensor:
        out = torch.empty(2, LAYERS, end - start, HEADS * SIZE)
        self.workers[rank]._cache.gather(self.tables[request.request_id], start, end, out)
        return out


def request(rid: str, prompt: list[int], params: dict[str, Any] | None = None, **more: Any) -> Any:
    base = dict(request_id=rid, prompt_token_ids=prompt, kv_transfer_params=params, lora_request=None, cache_salt=None, mm_features=[], output_token_ids=[])
    return SimpleNamespace(**{**base, **more})


def eventually(what: Callable[[], Any], text: str) -> None:
    end, tick = time.monotonic() + WAIT, threading.Event()
    while not what():
        assert time.monotonic() < end, f"after {WAIT:g} s: not {text}"
        tick.wait(0.005)


class Pair:
    """A prefill and a decode engine with an agent for each rank."""

    def __init__(self, agents: Any, ranks: int = 1, chunk: int = 64, staging: int = 8, slots: int = 16, **settings: Any) -> None:
        shape = f"kv_shape: [{LAYERS}, 2, {chunk}, {HEADS}, {SIZE}]\nkv_dtype: float\n"
        size = 2 * LAYERS * chunk * HEADS * SIZE * 4
        start = lambda role, n, rank: agents.start(role, n, "lease_sec: 2\n", shape, size, rank, ranks)  # noqa: E731
        self.senders = [start("sender", staging, r) for r in range(ranks)]
        self.receivers = [start("receiver", slots, r) for r in range(ranks)]
        self.p = Engine1(self.senders, sends=True, chunk=chunk, **settings)
        try:
            self.d = Engine1(self.receivers, receives=True, chunk=chunk, **settings)
        except BaseException:
            self.p.close()
            raise

    def spec(self, req: str) -> dict[str, Any]:
        return {"ret_first_tok": True, "disagg_spec": {
            "req_id": req, "receiver_host": "127.0.0.1", "receiver_alloc_port": [r.alloc_port for r in self.receivers],
            "receiver_init_port": [r.init_port for r in self.receivers],
        }}  # fmt: skip

    def prefill_request(self, req: str, prompt: list[int]) -> Any:
        return request(f"p-{req}", prompt, self.spec(req))

    def decode_request(self, req: str, prompt: list[int], rid: str = "") -> Any:
        return request(rid or f"d-{req}", [*prompt, 7], {"disagg_spec": {"req_id": req}} if req else None)

    def send(self, req: str, prompt: list[int], most: int = 1 << 20) -> None:
        r = self.prefill_request(req, prompt)
        assert self.p.admitted(r) == (0, False)
        self.p.prefill(r, most)
        r.output_token_ids = [7]
        assert self.p.finish(r) == {"first_tok": 7}

    def check(self, r: Any, tokens: int, start: int = 0) -> None:
        for rank in range(len(self.receivers)):
            got, want = self.d.cached(r, start, tokens, rank), truth(r.prompt_token_ids[:-1], rank)[:, :, start:tokens]
            assert torch.equal(got, want), f"rank {rank}: {(got != want).sum()} of {got.numel()} elements differ"

    def close(self) -> None:
        self.p.close()
        self.d.close()

    def empty(self) -> bool:
        return all(common.empty(a.status()) for a in [*self.senders, *self.receivers] if a.process.poll() is None)


@pytest.fixture
def pairs(agents: Any) -> Iterator[Callable[..., Pair]]:
    """Makes pairs, whose agents must be empty at the end while the engines are still connected."""
    made: list[Pair] = []

    def make(**options: Any) -> Pair:
        made.append(Pair(agents, **options))
        return made[-1]

    try:
        yield make
        for p in made:
            eventually(p.empty, f"every slot free: {[a.status() for a in [*p.senders, *p.receivers] if a.process.poll() is None]}")
    finally:
        for p in made:
            p.close()
