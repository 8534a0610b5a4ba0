"""The other side of BenchmarkCompare: a DEALER and a ROUTER on pyzmq's asyncio sockets.

  bench.py server           prints its port, answers every request, ends with standard input
  bench.py client PORT      reads lines "total outstanding", prints the seconds that so many requests took
"""
import asyncio, sys, time
import zmq, zmq.asyncio

REQUEST, ANSWER = bytes(600), bytes(100)


async def server():
    sock = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    print(sock.bind_to_random_port("tcp://127.0.0.1"), flush=True)

    async def serve():
        while True:
            identity, _, _ = await sock.recv_multipart()
            await sock.send_multipart([identity, b"", ANSWER])

    task = asyncio.create_task(serve())
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()


async def client(port):
    sock = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    sock.setsockopt(zmq.IDENTITY, b"bench")
    sock.connect(f"tcp://127.0.0.1:{port}")
    await sock.send_multipart([b"", REQUEST])
    await sock.recv_multipart()
    while line := await asyncio.to_thread(sys.stdin.readline):
        total, outstanding = map(int, line.split())
        begin = time.perf_counter()
        for i in range(total + outstanding):
            if i >= outstanding:
                await sock.recv_multipart()
            if i < total:
                await sock.send_multipart([b"", REQUEST])
        print(time.perf_counter() - begin, flush=True)


asyncio.run(server() if sys.argv[1] == "server" else client(int(sys.argv[2])))
