"""The tool under Wine, seen from Linux: serve is talked to by this program's own sockets and by load, and both
are told to stop in each of the ways that there are. Called by ci/windows.sh."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading

WINE, TOOL = os.environ["CORELANE_WINE"], sys.argv[1]
PATIENCE = 60


def start(*args):
    return subprocess.Popen(
        [WINE, TOOL, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def check(holds, what):
    if not holds:
        sys.exit(f"FAILED: {what}")
    print(f"ok: {what[:100]}")


def serve(kind, *args):
    """A running server, and where it listens."""
    server = start("serve", kind, "--listen", "127.0.0.1:0", "--until-stdin-ends", *args)
    # Whatever goes wrong, nothing waits for ever.
    guard = threading.Timer(2 * PATIENCE, server.kill)
    guard.daemon = True
    guard.start()
    line = server.stdout.readline()
    if not line.startswith("listening on "):
        server.kill()
        sys.exit(f"FAILED: the server said {line!r}, and {server.stderr.read()}")
    host, port = line.split()[-1].rsplit(":", 1)
    return server, (host, int(port))


def exchange(stream, data):
    """Sends data and returns as many bytes."""
    threading.Thread(target=stream.sendall, args=(data,)).start()
    back = b""
    while len(back) < len(data):
        piece = stream.recv(65536)
        if not piece:
            break
        back += piece
    return back


def ended(process):
    out, said = process.communicate(timeout=PATIENCE)
    return process.returncode, out, said


server, address = serve("echo", "--workers", "2", "--report-json", "-")
streams = [socket.create_connection(address, timeout=PATIENCE) for _ in range(50)]
for turn in range(3):
    for number, stream in enumerate(streams):
        data = bytes([turn, number]) * 100
        check(exchange(stream, data) == data, "echo") if number % 25 == 0 else exchange(stream, data)
block = os.urandom(500_000)
check(exchange(streams[0], block) == block, "half a megabyte comes back as it was")
streams[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
streams[1].close()
streams[2].shutdown(socket.SHUT_WR)
check(streams[2].recv(1) == b"", "the end of a stream is answered with the end")

load = start("load", "echo", "--target", "%s:%d" % address, "-c", "32", "-d", "2s", "--warmup", "200ms", "--json", "-")
code, out, said = ended(load)
# 5: too slow for its own schedule, which says nothing about a machine that runs Wine.
check(code in (0, 5), f"load ends with {code}: {said}")
result = json.loads(out)
check(result["environment"]["backend"] == "iocp", "the generator's backend is iocp")
check(result["errors"]["server_total"] == 0, f"no error in {result['window']['replied']} replies")
check(result["window"]["replied"] > 0 and result["ramp"]["connected"] == 32, "load got replies")

server.stdin.close()
server.stdin = None
code, out, said = ended(server)
check(code == 0, f"serve ends with {code}: {said}")
report = json.loads(out)
check(report["environment"]["backend"] == "iocp" and report["environment"]["fallback"] is None, "backend")
check("Windows" in report["environment"]["kernel"], report["environment"]["kernel"])
check(report["ops_in_kernel"] == 0 and report["buffers_outstanding"] == 0, "everything came back")
check(report["counters"]["accepted"] == 82, "50 and 32 connections were accepted")

server, address = serve("heartbeat")
stream = socket.create_connection(address, timeout=PATIENCE)
check(exchange(stream, b"ping\n") == b"pong\n", "heartbeat")
# Wine makes Ctrl-C of SIGINT.
server.send_signal(signal.SIGINT)
check(stream.recv(1) == b"", "Ctrl-C ends connections in good order")
code, _, said = ended(server)
check(code == 0 and "signal: shutting down" in said, f"Ctrl-C ends serve with {code}: {said}")

server, address = serve("echo", "--shutdown-timeout", "1ms")
stream = socket.create_connection(address, timeout=PATIENCE)
stream.setblocking(False)
# Until the server does not take any more, because nobody reads what it sends back.
while select.select([], [stream], [], 2)[1]:
    stream.send(b"x" * 65536)
server.stdin.close()
server.stdin = None
# Read only when it has ended: who reads before the deadline may get everything after all, and then nothing is reset.
code, _, said = ended(server)
check(code == 0 and "1 aborted, 0 operations left in the kernel, 0 buffers" in said, f"who took nothing is counted: {said}")
stream.settimeout(PATIENCE)
how = "in good order"
try:
    while stream.recv(1 << 20):
        pass
except ConnectionResetError:
    how = "reset"
check(how == "reset", "who took nothing is reset at the deadline, on the wire too")

code, out, said = ended(start("serve", "echo", "--backend", "epoll"))
check(code == 4 and "Linux" in said, f"epoll is refused with 4: {said}")
taken = socket.create_server(("127.0.0.1", 0))
code, out, said = ended(start("serve", "echo", "--listen", "127.0.0.1:%d" % taken.getsockname()[1]))
check(code == 4 and "netstat" in said, f"a port in use is refused with 4 and a remedy: {said}")
