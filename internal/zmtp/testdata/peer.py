"""libzmq's side of the interoperation tests. Prints "ok" or a line for each thing that happened; any surprise is an exception.

  peer.py bind TYPE PORT            (PORT 0: any; the port is printed) ROUTER and REP echo, PULL prints what comes
  peer.py connect TYPE PORT [IDENTITY]   DEALER, REQ: send each message, expect it back; PUSH: send each message
  peer.py reconnect PORT IDENTITY   DEALER: a message for each line of standard input, and its echo, over reconnects
  peer.py same-identity PORT        two DEALERs with one identity: the second is served when the first has gone
"""
import hashlib, sys
import zmq

TIMEOUT = 15_000
SIZES = [0, 1, 254, 255, 256, 600, 8192, 65_535, 65_536, 100_000, 3_000_000]
MESSAGES = [[bytes([i]) * n] for i, n in enumerate(SIZES)]
MESSAGES += [[b"a", b"", b"b" * 300, b"", b"c"], [b""] * 10]

ctx = zmq.Context()


def socket(kind, identity=b""):
    s = ctx.socket(getattr(zmq, kind))
    s.rcvtimeo = s.sndtimeo = TIMEOUT
    s.linger = TIMEOUT
    s.heartbeat_ivl, s.heartbeat_timeout, s.heartbeat_ttl = 50, 10_000, 10_000
    s.reconnect_ivl = 20
    if identity:
        s.identity = identity
    return s


def bind(kind, port):
    s = socket(kind)
    s.rcvtimeo = -1  # ends with its standard input
    print(s.bind_to_random_port("tcp://127.0.0.1") if port == "0" else s.bind(f"tcp://127.0.0.1:{port}") and port, flush=True)
    poller = zmq.Poller()
    poller.register(s, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready:
            return
        message = s.recv_multipart()
        if kind == "PULL":
            print(len(message), hashlib.sha256(b"|".join(message)).hexdigest(), flush=True)
        else:
            s.send_multipart(message)


def connect(kind, port, identity=""):
    s = socket(kind, identity.encode())
    s.connect(f"tcp://127.0.0.1:{port}")
    if kind == "DEALER":  # all under way at once
        for m in MESSAGES:
            s.send_multipart([b"", *m])
        for m in MESSAGES:
            assert s.recv_multipart() == [b"", *m]
    else:
        for m in MESSAGES:
            s.send_multipart(m)
            if kind == "REQ":
                assert s.recv_multipart() == m
    print("ok", flush=True)
    sys.stdin.read()
    s.close()


def reconnect(port, identity):
    s = socket("DEALER", identity.encode())
    s.connect(f"tcp://127.0.0.1:{port}")
    for line in sys.stdin:
        s.send_multipart([b"", line.strip().encode()])
        print(s.recv_multipart()[1].decode(), flush=True)
    s.close()


def same_identity(port):
    first, second = socket("DEALER", b"same"), socket("DEALER", b"same")
    first.connect(f"tcp://127.0.0.1:{port}")
    first.send(b"first")
    assert first.recv() == b"first"
    second.connect(f"tcp://127.0.0.1:{port}")
    second.send(b"second")
    assert second.poll(300) == 0
    first.send(b"still here")
    assert first.recv() == b"still here"
    first.close(0)
    assert second.recv() == b"second"
    print("ok", flush=True)
    second.close()


globals()[sys.argv[1].replace("-", "_")](*sys.argv[2:])
ctx.term()
