"""An LMCache sender's control plane, with the reference's own wire libraries.

  lmcache_sender.py ALLOC_PORT INIT_PORT NOTIFY_PORT

Checks what a Berth receiver answers to it, and that a Berth sender's ProxyNotif comes to a PULL socket.
"""
import sys
import msgspec, zmq

alloc_port, init_port, notify_port = map(int, sys.argv[1:])
ctx = zmq.Context()
pull = ctx.socket(zmq.PULL)
pull.rcvtimeo = 15000
pull.bind(f"tcp://127.0.0.1:{notify_port}")
print("pulling", flush=True)


class Base(msgspec.Struct, tag=True):
    pass


class AllocRequest(Base):
    keys: list[str]
    fmt: int
    shape: list[int]
    dtype: str
    last_chunk_toks: int
    req_id: str = ""
    is_last_batch: bool = False
    total_chunks: int = 0


class AllocResponse(Base):
    remote_indexes: list[int]
    already_sent_indexes: list[int] = []


class CancelNotif(Base):
    req_id: str
    keys: list[str]


class ProxyNotif(Base):
    req_id: str


class PySocketInitRequest(Base):
    peer_init_url: str | None


class PySocketInitResponse(Base):
    status: str


req = ctx.socket(zmq.REQ)
req.rcvtimeo = 5000
req.connect(f"tcp://127.0.0.1:{init_port}")
req.send(msgspec.msgpack.encode(PySocketInitRequest(None)))
assert msgspec.msgpack.decode(req.recv(), type=PySocketInitResponse).status == "ok"
req.close()

dealer = ctx.socket(zmq.DEALER)
dealer.setsockopt(zmq.IDENTITY, f"sender-to-127.0.0.1{init_port}".encode())
dealer.rcvtimeo = 5000
dealer.connect(f"tcp://127.0.0.1:{alloc_port}")


def call(message):
    dealer.send_multipart([b"", msgspec.msgpack.encode(message)])
    return msgspec.msgpack.decode(dealer.recv_multipart()[-1], type=AllocResponse)


def alloc(name, total, keys, last=False, tokens=16):
    return call(AllocRequest([f"m@1@0@{k}@uint8" for k in keys], 3, [16, 4096], "uint8", tokens, name, last, total)).remote_indexes


first = alloc("A", 8, ["0", "1", "2", "3", "4"])
assert len(first) == 5 and -1 not in first, first
assert alloc("B", 8, ["8"]) == [-1]  # a lock-step sender's second request that does not fit
rest = alloc("A", 8, ["5", "6", "7"], last=True, tokens=3)
assert len(rest) == 3 and -1 not in rest and len(set(first + rest)) == 8, rest
assert alloc("A", 8, ["9"]) == [-1]  # one more than declared rolls it back
assert alloc("C", 8, [], last=False) == []  # admission alone, in the room that A has left
assert call(CancelNotif("C", [])).remote_indexes == []
assert alloc("", 0, ["a", "b"]) != [-1, -1]  # without a name: a request of its own

word = msgspec.msgpack.decode(pull.recv(), type=ProxyNotif)
assert word.req_id == "word", word
ctx.destroy(linger=0)
