"""What the machine and a process do: samples of /proc, and the calibration that shows the machine's state."""
import json
import os
import subprocess
import time
from pathlib import Path

# A cache line to the other core and back: the two virtual processors share a core complex below this, or do not.
FAR_NS = 200.0
# A core that computes so much slower than the best that was seen had something else to do.
SLOWER = 1.10
# Of the two cores' time, taken by others than the server and the load.
FOREIGN = 0.04


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.monotonic()))


def sample(pid):
    """(time, processor seconds of all threads, context switches of all threads), or `None` when it has ended."""
    now = time.monotonic()
    cpu = switches = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            base = f"/proc/{pid}/task/{task}/"
            try:
                cpu += int(Path(base + "schedstat").read_text().split()[0])
                for line in Path(base + "status").read_text().splitlines():
                    if "ctxt_switches" in line:
                        switches += int(line.rsplit(":", 1)[1])
            except OSError:
                pass  # The thread ended meanwhile.
    except OSError:
        return None
    return now, cpu / 1e9, switches


def rates(before, after):
    """Processor time and context switches per second."""
    if not before or not after or after[0] <= before[0]:
        return {"cpu": 0.0, "switches": 0.0}
    seconds = after[0] - before[0]
    return {"cpu": (after[1] - before[1]) / seconds, "switches": (after[2] - before[2]) / seconds}


def memory(pid):
    """Resident memory in bytes: now, and at most so far."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) * 1024
    return found["VmRSS"], found["VmHWM"]


def backend(pid):
    """What the process's open descriptors say: how many rings and how many epolls."""
    rings = epolls = 0
    for entry in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{entry}")
        except OSError:
            continue
        rings += target.endswith("[io_uring]")
        epolls += target.endswith("[eventpoll]")
    return {"io_uring": rings, "epoll": epolls}


def count_system_calls(pid, seconds):
    """System calls per second that the process makes, by `perf`'s tracepoint counter; `None` where there is none."""
    try:
        done = subprocess.run(
            ["perf", "stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p", str(pid), "--", "sleep", f"{seconds:g}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=30 + seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    for line in done.stderr.splitlines():
        if "raw_syscalls" in line and line.split(",")[0].isdigit():
            return int(line.split(",")[0]) / seconds
    return None


class State:
    """The machine's state around runs. The state after one run is the state before the next, if that comes at once."""

    def __init__(self, client):
        self.client = client
        self.best = None
        self.taken = 0.0
        self.last = self.calibrate()
        self.mark = cpu_times()

    def calibrate(self):
        out = subprocess.run([self.client, "calibrate", "--cpus", "0,1"], stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(out.stdout)
        slower = max(found["compute_ms"])
        self.taken = time.monotonic()
        self.best = slower if self.best is None else min(self.best, slower)
        return found

    def begin(self):
        """Before a run; its own processor time is counted from here."""
        if time.monotonic() - self.taken > 2:
            self.last = self.calibrate()
        self.mark = cpu_times()
        return os.times()

    def stop(self, began, server_cpu):
        """When the load has ended and the server is still there: what others than these two took, and the host."""
        busy, steal, total = (after - before for after, before in zip(cpu_times(), self.mark))
        now = os.times()
        # Children that were waited for: the load. The server is still running.
        ours = server_cpu + sum(now[:4]) - sum(began[:4])
        total = max(total, 1e-9)
        return {"foreign": round(max(0.0, busy - ours) / total, 4), "steal": round(steal / total, 4)}

    def end(self, used):
        """When the server is gone, too: a label, and what it stands on. `near` and `far` can be compared, each with its like."""
        before, after = self.last, self.calibrate()
        self.last = after
        places = ["far" if each["round_trip_ns"] > FAR_NS else "near" for each in (before, after)]
        slow = max(*before["compute_ms"], *after["compute_ms"]) / self.best
        label = places[0] if places[0] == places[1] else "moved"
        if slow > SLOWER or used["foreign"] > FOREIGN or used["steal"] > FOREIGN:
            label = "noisy"
        return {
            "state": label,
            "round_trip_ns": [before["round_trip_ns"], after["round_trip_ns"]],
            "compute": round(slow, 3),
            **used,
        }


def cpu_times():
    """(busy, stolen, all) seconds of both cores together since boot."""
    fields = [int(field) / 100 for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, idle, iowait, irq, softirq, steal = fields
    # Interrupts are nobody's: on loopback they are the server's and the load's own.
    return user + nice + system, steal, user + nice + system + idle + iowait + irq + softirq + steal


def describe():
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")), "?")
    memory_kb = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    read = lambda path: Path(path).read_text().strip() if Path(path).exists() else "?"  # noqa: E731
    return {
        "kernel": read("/proc/sys/kernel/osrelease"),
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kb / 1024 / 1024, 1),
        "congestion_control": read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "somaxconn": read("/proc/sys/net/core/somaxconn"),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }
