#!/usr/bin/env python3
"""The same server on io_uring and on epoll: medians of interleaved rounds.

    cargo build --release --features cli
    python3 benches/backends.py target/release/corelane [ROUNDS]

Server on core 0, load generator (always on the best backend) on core 1. The order of the backends turns
around every round. Prints a Markdown table; ratios are io_uring / epoll within a round, their median and
their range.
"""
import json
import statistics
import subprocess
import sys

CELLS = [
    ("echo, 1 × 64 B", "echo", ["echo", "-c", "1", "--size", "64"]),
    ("echo, 64 × 64 B", "echo", ["echo", "-c", "64", "--size", "64"]),
    ("echo, 64 × 16 KiB", "echo", ["echo", "-c", "64", "--size", "16KiB"]),
    ("echo, 1000 × 1 KiB", "echo", ["echo", "-c", "1000", "--size", "1KiB"]),
    ("heartbeat, 5000 × 1/s", "heartbeat", ["heartbeat", "-c", "5000", "--interval", "1s"]),
]
BACKENDS = ["io_uring", "epoll"]


def run(tool, backend, kind, load):
    """One run; what it measured."""
    server = subprocess.Popen(
        [tool, "serve", kind, "--listen", "127.0.0.1:0", "--backend", backend, "--cpus", "0",
         "--until-stdin-ends", "--report-json", "-", "--shutdown-timeout", "2s"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        target = server.stdout.readline().removeprefix("listening on ").strip()
        done = subprocess.run(
            [tool, "load", *load, "--target", target, "-d", "3s", "--warmup", "500ms", "--cpus", "1",
             "--json", "-", "--quiet", "--server-pid", str(server.pid)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=60)
        report = json.loads(done.stdout)
        server.stdin.close()
        counters = json.loads(server.stdout.read())
    finally:
        server.kill()
        server.wait()
    environment = counters["environment"]
    assert environment["backend"] == backend, environment
    assert report["errors"]["server_total"] == 0, report["errors"]
    return {
        "cpu": report["server"]["cpu_us_per_message"],
        "rate": report["window"]["messages_per_s"],
        "p50": report["window"]["response_us"]["p50_us"],
        "p99": report["window"]["response_us"]["p99_us"],
        "calls": counters["counters"]["enters"] / max(1, counters["counters"]["messages"]),
    }


def main():
    tool = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    print("| cell | backend | messages/s | server CPU, µs | p50, µs | p99, µs | system calls/message |")
    print("|---|---|---|---|---|---|---|")
    for name, kind, load in CELLS:
        runs = {backend: [] for backend in BACKENDS}
        for turn in range(rounds):
            for backend in BACKENDS if turn % 2 == 0 else reversed(BACKENDS):
                runs[backend].append(run(tool, backend, kind, load))
        for backend in BACKENDS:
            median = {key: statistics.median(one[key] for one in runs[backend]) for key in runs[backend][0]}
            print(f"| {name} | {backend} | {median['rate']:,.0f} | {median['cpu']:.2f} | {median['p50']:.0f} "
                  f"| {median['p99']:.0f} | {median['calls']:.3f} |", flush=True)
        ratios = []
        for key in ("rate", "cpu", "p50", "p99"):
            each = sorted(a[key] / b[key] for a, b in zip(runs["io_uring"], runs["epoll"]))
            ratios.append(f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})")
        print(f"| | io_uring / epoll | {' | '.join(ratios)} | |", flush=True)


main()
