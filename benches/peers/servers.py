"""The servers that take part: how each is started, that it is what it says, and that it echoes."""
import json
import os
import random
import socket
import subprocess
import threading

import machine

SERVER_CPU = 0
MIB = 1024 * 1024


class Peer:
    """A server that takes part. `only`: the cells it is measured in, if not all."""

    def __init__(self, name, backend, binary, options, only=None, default=True):
        self.name, self.backend, self.binary, self.options = name, backend, binary, options
        self.only, self.default = only, default


def corelane(name, *options, backend="io_uring", default=True):
    # The same buffers as the floor and ringline: 256 of 16 KiB. The runtimes have one of 16 KiB for each connection.
    options = ["--buffers", "16KiBx256", "--backend", backend, *options]
    return Peer(name, backend, "corelane", options, default=default)


BULK = ["bulk", "stream1", "stream8"]
PEERS = [
    corelane("corelane", "--tier", "handler"),
    corelane("corelane-async", "--tier", "async"),
    corelane("corelane-epoll", "--tier", "handler", backend="epoll"),
    Peer("floor", "io_uring", "floor", []),
    Peer("floor-inc", "io_uring", "floor", ["--buffers", "incremental"], only=BULK),
    Peer("tokio", "epoll", "tokio", []),
    Peer("tokio-mt", "epoll", "tokio", ["--flavor", "multi"]),
    Peer("monoio", "io_uring", "monoio", []),
    Peer("compio", "io_uring", "compio", []),
    Peer("glommio", "io_uring", "glommio", []),
    Peer("ntex", "io_uring", "ntex", []),
    Peer("ringline", "io_uring", "ringline", []),
    Peer("smol", "epoll", "smol", []),
    Peer("mio", "epoll", "mio", []),
    # Other ways to write the same, on request.
    Peer("ringline-data", "io_uring", "ringline", ["--flavor", "data"], default=False),
    Peer("compio-defer", "io_uring", "compio", ["--taskrun", "defer"], default=False),
    corelane("corelane-fd", "--tier", "handler", "--descriptors", "fd", default=False),
]


class Server:
    """A server that is up; ends when the block that it is used in ends."""

    def __init__(self, peer, mode, tools, directory, extra=()):
        if peer.binary == "corelane":
            command = [tools.corelane, "serve", mode, "--listen", "127.0.0.1:0", *peer.options, "--cpus", str(SERVER_CPU),
                       "--workers", "1", "--backlog", "4096", "--max-connections", "16384", "--until-stdin-ends",
                       "--shutdown-timeout", "1s", *extra]
        else:
            command = [os.path.join(directory, peer.binary), "--listen", "127.0.0.1:0", "--cpu", str(SERVER_CPU),
                       "--workers", "1", "--mode", mode, *peer.options]
        self.peer = peer
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {SERVER_CPU}))
        self.pid = self.process.pid
        try:
            line = self.process.stdout.readline()
            if not line.startswith("listening on "):
                raise RuntimeError(f"{peer.name} did not start: {line!r}")
            self.address = line.removeprefix("listening on ").strip()
            if peer.binary == "corelane":
                version = subprocess.run([tools.corelane, "--version"], stdout=subprocess.PIPE, text=True, check=True)
                self.info = {"runtime": version.stdout.strip(), "driver": " ".join(peer.options)}
            else:
                self.info = json.loads(self.process.stdout.readline())
            # Not what it says: what it has open.
            self.info["open"] = found = machine.backend(self.pid)
            right = found["io_uring"] > 0 if peer.backend == "io_uring" else not found["io_uring"] and found["epoll"] > 0
            if not right:
                raise RuntimeError(f"{peer.name} should run on {peer.backend}, and has open: {found}")
        except BaseException:
            self.end()
            raise

    def end(self):
        """In good order; by force when that takes too long."""
        self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


def check_echo(address, seed=1):
    """Random messages of random sizes, cut at random, on several connections at a time; every byte is compared. Then the
    sending side is closed, and the server has to close its own."""
    host, port = address.rsplit(":", 1)
    failures = []

    def one(number):
        rng = random.Random(seed * 1000 + number)
        try:
            with socket.create_connection((host, int(port)), timeout=10) as stream:
                for _ in range(12):
                    data = rng.randbytes(int(2 ** rng.uniform(0, 18)))
                    sender = threading.Thread(target=send_cut, args=(stream, data, rng.randrange(1, 65536)))
                    sender.start()
                    got = receive(stream, len(data))
                    sender.join()
                    if got != data:
                        raise AssertionError(f"{len(data)} bytes were sent, {len(got)} came back, not the same")
                stream.shutdown(socket.SHUT_WR)
                if stream.recv(1):
                    raise AssertionError("more came back than was sent")
        except (OSError, AssertionError) as error:
            failures.append(f"connection {number}: {error}")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise RuntimeError("; ".join(failures[:3]))


def send_cut(stream, data, piece):
    try:
        for start in range(0, len(data), piece):
            stream.sendall(data[start:start + piece])
    except OSError:
        pass  # The receiving side sees that something is missing.


def receive(stream, length):
    got = bytearray()
    while len(got) < length:
        data = stream.recv(min(length - len(got), MIB))
        if not data:
            break
        got += data
    return bytes(got)
