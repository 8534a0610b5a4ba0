#!/usr/bin/env python3
"""Real LMCache PD backends (PDBackendAsync, CPU buffers, NIXL) to test against: any number of them, of either side, in one process.

Prints {"ready": true} and then answers one JSON command a line from standard input with one line; with the path of a socket as its argument it does
so, in a process forked for it, for each connection there, once that has said {"log": PATH}. Commands name the backend by "at".
  {"op":"open","at":A,"role":"receiver","host":H,"init":P,"alloc":P, ...}   ... = "slots", "shape", "dtype", "mla", "timeout", "rank", "ranks", all optional
  {"op":"open","at":A,"role":"sender","proxy":P, ...}
Without a backend:
  {"op":"pull"}               -> {"port": P}       binds a PULL socket, as LMCache's proxy does
  {"op":"words","count":N}    -> {"keys": [..]}    the req_ids of the next N ProxyNotif on it
  {"op":"options"}            -> {"keys": [..]}    the names and old names of LMCache's options
Receiver:
  {"op":"state"}              -> {"free": n, "reserved": n, "waiting": n, "keys": [..]}   waiting: batches that wait for a reservation or for memory
  {"op":"get","keys":[K..]}   -> {"sha256":[..]}   digest of each chunk's bytes, null where there is none
  {"op":"remove","keys":[K..]}-> {"removed": n}    what the engine does after it has read a chunk
Sender:
  {"op":"put","req":ID,"host":H,"init":[P..],"alloc":[P..],"keys":[K..],"total":N,"last":true,"seed":S,"last_toks":T}
        stages len(keys) chunks of pseudo-random bytes (the last of them partial with last_toks) and submits them as one batch
        -> {"sha256":[..]}   one digest a chunk, once submitted (not once written)
  {"op":"cancel","req":ID}
  {"op":"word","req":ID}      says ProxyNotif, once more or not, on the connection that it always has
  {"op":"state"}              -> {"free": n, "tracked": [requests that have not ended]}
"""
import asyncio, hashlib, json, os, select, signal, socket, sys
from types import SimpleNamespace
import lmcache.v1.config, msgspec, torch, zmq
from lmcache.utils import CacheEngineKey, STR_DTYPE_TO_TORCH_DTYPE
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.pd_backend_async import PDBackendAsync, ProxyNotif


def size(shape, dtype):
    n = torch.tensor([], dtype=dtype).element_size()
    for d in shape:
        n *= d
    return n


class Peer:
    def __init__(self, c):
        self.shape = c.get("shape", [2, 4, 256, 64])  # [2, layers, tokens, hidden]; of MLA [1, layers, tokens, head]
        self.dtype = STR_DTYPE_TO_TORCH_DTYPE[c.get("dtype", "bfloat16")]
        self.fmt = MemoryFormat.KV_MLA_FMT if c.get("mla") else MemoryFormat.KV_2LTD
        self.chunk = size(self.shape, self.dtype)
        if c["role"] == "receiver":
            extra = dict(pd_peer_host=c["host"], pd_peer_init_port=[c["init"]], pd_peer_alloc_port=[c["alloc"]])
        else:
            extra = dict(pd_proxy_host="127.0.0.1", pd_proxy_port=c["proxy"])
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=self.shape[2], enable_pd=True, pd_role=c["role"], pd_buffer_size=self.chunk * c.get("slots", 10), pd_buffer_device="cpu",
            transfer_channel="nixl", nixl_backends=["UCX"], pd_backend_mode="async", pd_allocation_timeout_sec=c.get("timeout", 30.0), **extra)
        metadata = LMCacheMetadata(model_name="m", world_size=c.get("ranks", 1), local_world_size=c.get("ranks", 1), worker_id=c.get("rank", 0),
                                   local_worker_id=c.get("rank", 0), kv_dtype=self.dtype,
                                   kv_shape=tuple(self.shape), use_mla=bool(c.get("mla")), chunk_size=self.shape[2])
        self.b = PDBackendAsync(config, metadata)
        self.sender = c["role"] == "sender"

    def state(self, c):
        if self.sender:
            return dict(free=self.b._get_free_chunks(), tracked=list(self.b._req_total_chunks))
        admission = self.b._recv_reservation_mgr
        waiting = sum(len(c._waiters) for c in (admission._async_admit_condition, self.b._alloc_freed_condition) if c)
        return dict(free=self.b._get_free_chunks(), reserved=admission._total_reserved, waiting=waiting, keys=[k.to_string() for k in list(self.b.data)])

    def get(self, c):
        def digest(key):
            m = self.b.data.get(CacheEngineKey.from_string(key))
            return None if m is None else hashlib.sha256(m.tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        return dict(sha256=[digest(k) for k in c["keys"]])

    def remove(self, c):
        return dict(removed=sum(bool(self.b.remove(CacheEngineKey.from_string(k))) for k in c["keys"]))

    def put(self, c):
        gen = torch.Generator().manual_seed(c.get("seed", 0))
        objs, digests = [], []
        for i in range(len(c["keys"])):
            shape = list(self.shape)
            if i == len(c["keys"]) - 1 and c.get("last_toks"):
                shape[2] = c["last_toks"]
            m = self.b.allocate(torch.Size(shape), self.dtype, self.fmt)
            if m is None:
                raise RuntimeError("staging allocation timed out")
            raw = torch.randint(0, 256, (size(shape, self.dtype),), dtype=torch.uint8, generator=gen)
            m.raw_data.view(torch.uint8).flatten()[: raw.numel()].copy_(raw)
            digests.append(hashlib.sha256(raw.numpy().tobytes()).hexdigest())
            objs.append(m)
        spec = SimpleNamespace(req_id=c["req"], receiver_host=c["host"], receiver_init_port=c["init"], receiver_alloc_port=c["alloc"],
                               is_last_prefill=c.get("last", True), total_chunks=c["total"])
        self.b.batched_submit_put_task([CacheEngineKey.from_string(k) for k in c["keys"]], objs, transfer_spec=spec)
        for m in objs:
            m.ref_count_down()
        return dict(sha256=digests)

    def word(self, c):
        asyncio.run_coroutine_threadsafe(self.b._send_proxy_notif(SimpleNamespace(req_id=c["req"])), self.b._sender_loop).result(30)
        return {}

    def cancel(self, c):
        self.b.cancel_request(c["req"])
        return {}


def pull(c, sockets):
    if c["op"] == "pull":
        s = zmq.Context.instance().socket(zmq.PULL)
        s.setsockopt(zmq.RCVTIMEO, 30000)
        sockets.append(s)
        return dict(port=s.bind_to_random_port("tcp://127.0.0.1"))
    return dict(keys=[msgspec.msgpack.decode(sockets[-1].recv(), type=ProxyNotif).req_id for _ in range(c["count"])])


def run(commands, answers):
    peers, sockets = {}, []
    os.dup2(2, 1)  # what libraries print must not come between the answers
    say = lambda d: print(json.dumps(d), file=answers, flush=True)
    say(dict(ready=True, pid=os.getpid()))
    for line in commands:
        try:
            c = json.loads(line)
            if c["op"] == "open":
                peers[c["at"]] = Peer(c)
                say(dict(chunk=peers[c["at"]].chunk))
            elif c["op"] == "options":
                say(dict(keys=list(lmcache.v1.config._CONFIG_DEFINITIONS) + list(lmcache.v1.config._CONFIG_ALIASES)))
            elif c["op"] in ("pull", "words"):
                say(pull(c, sockets))
            elif c["op"] in ("state", "get", "remove", "put", "cancel", "word"):
                say(getattr(peers[c["at"]], c["op"])(c))
            else:
                say(dict(error="unknown op"))
        except Exception as e:
            say(dict(error=f"{type(e).__name__}: {e}"))
    os._exit(0)


def forks(path):
    """Makes a process of its own for each connection: what it reads first is where it logs. Ends with standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    s = socket.socket(socket.AF_UNIX)
    s.bind(path)
    s.listen(64)
    print(json.dumps(dict(ready=True)), flush=True)
    while True:
        if sys.stdin in select.select([sys.stdin, s], [], [])[0]:
            os._exit(0)
        conn, _ = s.accept()
        if os.fork() == 0:
            os.setsid()
            s.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            commands = conn.makefile("r")
            os.dup2(os.open(json.loads(commands.readline())["log"], os.O_WRONLY | os.O_APPEND), 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run(commands, conn.makefile("w"))
        conn.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        forks(sys.argv[1])
    else:
        run(sys.stdin, os.fdopen(os.dup(1), "w"))
