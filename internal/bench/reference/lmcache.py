"""One process of the reference: LMCache's PD backend (PDBackendAsync, CPU, NIXL), or a pyzmq client of a control port.

  lmcache.py control --init P --alloc P --slots N          a receiver that answers control messages and moves nothing
  lmcache.py receive --init P --alloc P --drain P --slots N --shape 2,4,256,64
  lmcache.py send    --init P --alloc P --drain P --proxy P --slots N --shape .. --id N
  lmcache.py client  --alloc P                             AllocRequest and CancelNotif in turn

Prints {"ready": true}; then answers each JSON line with one. A request of `send` counts from its submission to ProxyNotif;
`receive` removes its chunks then, as an engine does that has read them.
"""
import argparse
import json
import sys
import time

import msgspec
import zmq


def say(**d):
    print(json.dumps(d), flush=True)


def key(sender, request, chunk):
    return f"m@1@0@{(sender << 40) + (request << 12) + chunk:x}@bfloat16"


def backend(role, a, channel, **extra):
    from lmcache.utils import STR_DTYPE_TO_TORCH_DTYPE
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.pd_backend_async import PDBackendAsync
    kv, layers, tokens, hidden = a.shape
    dtype = STR_DTYPE_TO_TORCH_DTYPE["bfloat16"]
    chunk = kv * layers * tokens * hidden * 2
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=tokens, enable_pd=True, pd_role=role, pd_buffer_size=chunk * a.slots, pd_buffer_device="cpu", transfer_channel=channel,
        nixl_backends=["UCX"], pd_backend_mode="async", pd_allocation_timeout_sec=60.0, **extra)
    metadata = LMCacheMetadata(model_name="m", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=dtype,
                               kv_shape=(kv, layers, tokens, hidden), chunk_size=tokens)
    return PDBackendAsync(config, metadata), dtype


def receiver(a, channel):
    return backend("receiver", a, channel, pd_peer_host="127.0.0.1", pd_peer_init_port=[a.init], pd_peer_alloc_port=[a.alloc])[0]


def control(a):
    receiver(a, "mock_memory")
    say(ready=True)
    sys.stdin.read()


def receive(a):
    from lmcache.utils import CacheEngineKey
    b = receiver(a, "nixl")
    pull = zmq.Context().socket(zmq.PULL)
    pull.bind(f"tcp://127.0.0.1:{a.drain}")
    say(ready=True)
    while True:
        sender, request, n = json.loads(pull.recv())
        for k in range(n):
            b.remove(CacheEngineKey.from_string(key(sender, request, k)))


def send(a):
    import torch
    from types import SimpleNamespace
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryFormat
    ctx = zmq.Context()
    pull, drain = ctx.socket(zmq.PULL), ctx.socket(zmq.PUSH)
    pull.bind(f"tcp://127.0.0.1:{a.proxy}")
    drain.connect(f"tcp://127.0.0.1:{a.drain}")
    b, dtype = backend("sender", a, "nixl", pd_proxy_host="127.0.0.1", pd_proxy_port=a.proxy)

    def submit(j, chunks):
        objs = [b.allocate(torch.Size(a.shape), dtype, MemoryFormat.KV_2LTD) for _ in range(chunks)]
        spec = SimpleNamespace(req_id=f"{a.id}-{j}", receiver_host="127.0.0.1", receiver_init_port=[a.init], receiver_alloc_port=[a.alloc],
                               is_last_prefill=True, total_chunks=chunks)
        b.batched_submit_put_task([CacheEngineKey.from_string(key(a.id, j, k)) for k in range(chunks)], objs, transfer_spec=spec)
        for o in objs:
            o.ref_count_down()

    def ready(chunks):
        j = int(msgspec.msgpack.decode(pull.recv())["req_id"].split("-")[1])
        drain.send(json.dumps([a.id, j, chunks]).encode())
        return j

    say(ready=True)
    for line in sys.stdin:
        c = json.loads(line)
        first, count, chunks, inflight, at = c["first"], c["count"], c["chunks"], c["inflight"], c.get("arrivals")
        begun, lat, sent, t0 = {}, [], 0, time.perf_counter()
        while len(lat) < count:
            while sent < count and sent - len(lat) < inflight:
                due = t0 + at[sent] if at else time.perf_counter()
                wait = due - time.perf_counter()
                if wait > 0:
                    if sent > len(lat) and pull.poll(wait * 1000):
                        break  # an answer came first
                    time.sleep(max(due - time.perf_counter(), 0))
                begun[first + sent] = due
                submit(first + sent, chunks)
                sent += 1
            j = ready(chunks)
            lat.append(time.perf_counter() - begun.pop(j))
        say(seconds=time.perf_counter() - t0, latency=lat)


def client(a):
    s = zmq.Context().socket(zmq.DEALER)
    s.setsockopt(zmq.IDENTITY, b"bench-to-%d#%d" % (a.alloc, time.time_ns()))
    s.connect(f"tcp://127.0.0.1:{a.alloc}")
    say(ready=True)
    for line in sys.stdin:
        c = json.loads(line)
        lat, t0 = [], time.perf_counter()
        for j in range(c["first"], c["first"] + c["count"]):
            keys = [key(0, j, k) for k in range(c["keys"])]
            req = {"type": "AllocRequest", "keys": keys, "fmt": 1, "shape": [2, 4, 256, 64], "dtype": "bfloat16", "last_chunk_toks": 256,
                   "req_id": f"py-{j}", "is_last_batch": False, "total_chunks": c["keys"]}
            t = time.perf_counter()
            s.send_multipart([b"", msgspec.msgpack.encode(req)])
            got = msgspec.msgpack.decode(s.recv_multipart()[-1])["remote_indexes"]
            lat.append(time.perf_counter() - t)
            if len(got) != c["keys"] or -1 in got:
                say(error=f"request {j} got {got}")
                return
            s.send_multipart([b"", msgspec.msgpack.encode({"type": "CancelNotif", "req_id": f"py-{j}", "keys": keys})])
            s.recv_multipart()
        say(seconds=time.perf_counter() - t0, latency=lat)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["control", "receive", "send", "client"])
    for name in ("init", "alloc", "drain", "proxy", "slots", "id"):
        p.add_argument("--" + name, type=int, default=0)
    p.add_argument("--shape", default="2,4,256,64", type=lambda s: [int(x) for x in s.split(",")])
    a = p.parse_args()
    {"control": control, "receive": receive, "send": send, "client": client}[a.what](a)
