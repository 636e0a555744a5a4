"""What the side-by-side comparisons have in common: one server after the other under the same load, interleaved."""
import json
import statistics
import subprocess

CELLS = [
    ("echo, 1 × 64 B", "echo", ["echo", "-c", "1", "--size", "64"]),
    ("echo, 64 × 64 B", "echo", ["echo", "-c", "64", "--size", "64"]),
    ("echo, 64 × 16 KiB", "echo", ["echo", "-c", "64", "--size", "16KiB"]),
    ("echo, 1000 × 1 KiB", "echo", ["echo", "-c", "1000", "--size", "1KiB"]),
    ("heartbeat, 5000 × 1/s", "heartbeat", ["heartbeat", "-c", "5000", "--interval", "1s"]),
]


def run(tool, kind, load, options, check, seconds=3):
    """One run, with the server on core 0 and the load generator on core 1; what it measured."""
    server = subprocess.Popen(
        [tool, "serve", kind, "--listen", "127.0.0.1:0", *options, "--cpus", "0",
         "--until-stdin-ends", "--report-json", "-", "--shutdown-timeout", "2s"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        target = server.stdout.readline().removeprefix("listening on ").strip()
        done = subprocess.run(
            [tool, "load", *load, "--target", target, "-d", f"{seconds}s", "--warmup", "500ms", "--cpus", "1",
             "--json", "-", "--quiet", "--server-pid", str(server.pid)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=60 + seconds)
        report = json.loads(done.stdout)
        server.stdin.close()
        counters = json.loads(server.stdout.read())
    finally:
        server.kill()
        server.wait()
    check(counters["environment"])
    assert report["errors"]["server_total"] == 0, report["errors"]
    return {
        "cpu": report["server"]["cpu_us_per_message"],
        "rate": report["window"]["messages_per_s"],
        "p50": report["window"]["response_us"]["p50_us"],
        "p99": report["window"]["response_us"]["p99_us"],
        "p99.9": report["window"]["response_us"]["p999_us"],
        "calls": counters["counters"]["enters"] / max(1, counters["counters"]["messages"]),
    }


def compare(tool, rounds, what, flag, first, second):
    """Prints a Markdown table. Ratios are first / second within a round, their median and their range."""
    def check_is(wanted):
        def check(environment):
            assert environment[what] == wanted, environment
        return check

    print(f"| cell | {what} | messages/s | server CPU, µs | p50, µs | p99, µs | p99.9, µs | system calls/message |")
    print("|---|---|---|---|---|---|---|---|")
    for name, kind, load in CELLS:
        runs = {first: [], second: []}
        for turn in range(rounds):
            order = [first, second] if turn % 2 == 0 else [second, first]
            for one in order:
                runs[one].append(run(tool, kind, load, [flag, one], check_is(one)))
        for one in (first, second):
            median = {key: statistics.median(each[key] for each in runs[one]) for key in runs[one][0]}
            print(f"| {name} | {one} | {median['rate']:,.0f} | {median['cpu']:.2f} | {median['p50']:.0f} "
                  f"| {median['p99']:.0f} | {median['p99.9']:.0f} | {median['calls']:.3f} |", flush=True)
        ratios = []
        for key in ("rate", "cpu", "p50", "p99", "p99.9"):
            each = sorted(a[key] / b[key] for a, b in zip(runs[first], runs[second]))
            ratios.append(f"{statistics.median(each):.2f} ({each[0]:.2f} to {each[-1]:.2f})")
        print(f"| | {first} / {second} | {' | '.join(ratios)} | |", flush=True)
