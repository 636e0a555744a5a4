"""The cells: what load each of them is, and how it is measured."""
import json
import subprocess
import time

import machine

LOAD_CPU = 1
# Connections begun per second by `corelane load`.
RAMP = 20_000


class Cell:
    """One row of the comparison: a name, a load, and the servers' mode."""

    def __init__(self, name, title, tool, options, connections, mode="echo", unit="message"):
        self.name, self.title, self.tool, self.options = name, title, tool, options
        self.connections, self.mode, self.unit = connections, mode, unit


def size_name(size):
    return f"{size} B" if size < 1024 else f"{size // 1024} KiB"


def all_cells():
    cells = []
    for connections in (1, 16, 64, 1000, 8000):
        for size in (64, 1024, 16384):
            # Beyond some thousands of connections one source address runs short of ports.
            sources = ["--source", "127.0.0.2-9"] if connections >= 1000 else []
            cells.append(Cell(
                f"c{connections}x{size}", f"{connections} × {size_name(size)}", "load",
                ["-c", str(connections), "--size", str(size), *sources], connections))
    cells.append(Cell("pipe16", "64 × 64 B, pipeline 16", "load",
                      ["-c", "64", "--size", "64", "--pipeline", "16"], 64))
    for rate in (20, 50, 100):
        cells.append(Cell(f"open{rate}k", f"64 × 64 B, open loop at {rate},000/s", "load",
                          ["-c", "64", "--size", "64", "--rate", f"{rate}k/s"], 64))
    cells.append(Cell("bulk", "64 × 16 KiB, pipeline 64 (64 MiB outstanding)", "load",
                      ["-c", "64", "--size", "16384", "--pipeline", "64", "--timeout", "10s"], 64))
    for connections in (1, 8):
        cells.append(Cell(f"stream{connections}", f"one-way stream, {connections} connection(s), per 16 KiB", "client",
                          ["stream", "--connections", str(connections)], connections, "discard", "16 KiB"))
    cells.append(Cell("churn", "churn: connect, 64 B, close; 32 at a time", "client",
                      ["churn", "--connections", "32", "--sources", "32", "--size", "64"], 32, unit="connection"))
    cells.append(Cell("slow", "64 × 64 B beside 16 slow readers of bulk", "client",
                      ["slow", "--connections", "64", "--slow", "16", "--size", "64"], 64))
    cells.append(Cell("idle", "15,000 idle connections", "idle",
                      ["idle", "--connections", "15000", "--sources", "8", "--size", "64"], 15000))
    return cells


QUICK = ["c1x64", "c64x64", "c64x16384", "c1000x1024", "c8000x64", "pipe16", "open50k", "bulk", "stream1", "stream8",
         "churn", "slow", "idle"]


class Tools:
    """Where the load tools are."""

    def __init__(self, corelane, client):
        self.corelane, self.client = corelane, client


def measure(cell, server, tools, seconds, warmup, rest):
    """Runs the cell's load against a server that is up. What it measured, with `None` for what does not apply."""
    if cell.tool == "load":
        return by_load(cell, server, tools, seconds, warmup)
    if cell.tool == "client":
        return by_client(cell, server, tools, seconds, warmup)
    return idle(cell, server, tools, rest)


def by_load(cell, server, tools, seconds, warmup):
    """`corelane load`; the server's and the tool's resources are sampled by this program within the window."""
    command = [tools.corelane, "load", "echo", *cell.options, "--target", server.address, "-d", f"{seconds:g}s",
               "--warmup", f"{warmup:g}s", "--cpus", str(LOAD_CPU), "--backend", "io_uring", "--json", "-", "--quiet",
               "--server-pid", str(server.pid)]
    load = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        start = time.monotonic() + cell.connections / RAMP + warmup
        machine.sleep_until(start + min(0.1, seconds / 5))
        before = machine.sample(server.pid), machine.sample(load.pid)
        machine.sleep_until(start + seconds - min(0.05, seconds / 10))
        after = machine.sample(server.pid), machine.sample(load.pid)
        out, err = load.communicate(timeout=60 + seconds)
    finally:
        load.kill()
        load.wait()
    if not out:
        raise RuntimeError(f"corelane load: {err.strip()[-300:]}")
    report = json.loads(out)
    window, errors = report["window"], report["errors"]
    rate = window["messages_per_s"]
    latency = window["response_us"]
    server_use, load_use = machine.rates(before[0], after[0]), machine.rates(before[1], after[1])
    reported = (report["server"] or {}).get("cpu_us_per_message")
    return {
        "rate": rate,
        "cpu": per_message(server_use["cpu"], rate),
        "cpu_by_load": reported,
        "busy": server_use["cpu"],
        "switches": server_use["switches"] / rate if rate else None,
        "p50": latency["p50_us"], "p99": latency["p99_us"], "p99.9": latency["p999_us"],
        "load_cpu": per_message(load_use["cpu"], rate),
        "load_busy": load_use["cpu"],
        "rate_ratio": report["generator"]["rate_ratio"],
        "errors": errors["server_total"],
        # The tool's own: a message that was sent late because the machine had something else to do, for one.
        "load_errors": errors["generator_total"],
        "verdict": report["verdict"]["reasons"],
        "peak": machine.memory(server.pid)[1],
    }


def client(tools, cell, server, seconds, warmup, options):
    command = [tools.client, *options, "--target", server.address, "--seconds", f"{seconds:g}", "--warmup", f"{warmup:g}",
               "--server-pid", str(server.pid), "--cpu", str(LOAD_CPU)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def by_client(cell, server, tools, seconds, warmup, options=None):
    """The second load tool, which samples the server itself."""
    load = client(tools, cell, server, seconds, warmup, options or cell.options)
    try:
        start = time.monotonic() + warmup
        machine.sleep_until(start + min(0.1, seconds / 5))
        before = machine.sample(load.pid)
        machine.sleep_until(start + seconds - min(0.1, seconds / 5))
        after = machine.sample(load.pid)
        out, err = load.communicate(timeout=60 + seconds)
    finally:
        load.kill()
        load.wait()
    if not out:
        raise RuntimeError(f"client: {err.strip()[-300:]}")
    report = json.loads(out)
    messages, rate = report["messages"], report["messages_per_s"]
    use = machine.rates(before, after)
    latency = report["max_us"] > 0
    return {
        "rate": rate,
        "cpu": report["server_cpu_ns"] / 1e3 / messages if messages else None,
        "busy": report["server_cpu_ns"] / 1e9 / report["seconds"],
        "switches": report["server_switches"] / messages if messages else None,
        "p50": report["p50_us"] if latency else None,
        "p99": report["p99_us"] if latency else None,
        "p99.9": report["p999_us"] if latency else None,
        "load_cpu": per_message(use["cpu"], rate),
        "load_busy": use["cpu"],
        "errors": report["errors"],
        "slow_missing_bytes": report.get("slow_missing_bytes"),
        # Of those that read at once, how many had no reply at all within the window.
        "unserved": report.get("unserved_connections"),
        "verdict": [] if messages else ["nothing was answered"],
        # After what the slow readers were owed has been read: memory's peak is then behind the server.
        "peak": machine.memory(server.pid)[1],
    }


def idle(cell, server, tools, rest):
    """Memory of each connection after one message, and what the server does while nothing happens."""
    empty = machine.memory(server.pid)[0]
    load = client(tools, cell, server, 1, 0, cell.options)
    try:
        line = load.stdout.readline()
        if not line:
            raise RuntimeError(f"client: {load.stderr.read().strip()[-300:]}")
        opened = json.loads(line)
        time.sleep(0.5)
        before = machine.sample(server.pid)
        time.sleep(rest)
        after = machine.sample(server.pid)
        full, peak = machine.memory(server.pid)
        out, _ = load.communicate(timeout=60)
        lost = json.loads(out)["lost"] if out else cell.connections
    finally:
        load.kill()
        load.wait()
    use = machine.rates(before, after)
    return {
        "bytes": (full - empty) / opened["connected"],
        "rss_empty": empty,
        "rest_cpu": use["cpu"] * 100,
        "rest_switches": use["switches"],
        "peak": peak,
        "errors": opened["unanswered"] + lost,
        "verdict": [],
    }


def per_message(cores, rate):
    """Microseconds of processor time per message."""
    return cores * 1e6 / rate if rate else None


def system_calls(cell, server, tools, seconds):
    """System calls per message of the server, counted by `perf` in a run of its own; `None` where it cannot."""
    if cell.tool == "idle":
        return None
    if cell.tool == "load":
        command = [tools.corelane, "load", "echo", *cell.options, "--target", server.address, "-d", f"{seconds:g}s",
                   "--warmup", "200ms", "--cpus", str(LOAD_CPU), "--json", "-", "--quiet"]
        ramp = cell.connections / RAMP
    else:
        command = [tools.client, *cell.options, "--target", server.address, "--seconds", f"{seconds:g}",
                   "--warmup", "0.2", "--cpu", str(LOAD_CPU)]
        ramp = 0
    load = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        time.sleep(ramp + 0.2 + seconds * 0.2)
        calls = machine.count_system_calls(server.pid, seconds * 0.5)
        out, _ = load.communicate(timeout=60)
    finally:
        load.kill()
        load.wait()
    if calls is None or not out:
        return None
    report = json.loads(out)
    rate = report["window"]["messages_per_s"] if cell.tool == "load" else report["messages_per_s"]
    return calls / rate if rate else None
