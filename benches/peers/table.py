"""The figures as one Markdown file, what is lost first."""
import statistics

BASE = "corelane"
MIB = 1024 * 1024

# key, column, whether more is better, format
METRICS = [
    ("rate", "per second", True, lambda v: f"{v:,.0f}"),
    ("cpu", "server CPU, µs", False, lambda v: f"{v:.3f}"),
    ("p50", "p50, µs", False, lambda v: f"{v:,.0f}"),
    ("p99", "p99, µs", False, lambda v: f"{v:,.0f}"),
    ("p99.9", "p99.9, µs", False, lambda v: f"{v:,.0f}"),
    ("peak", "peak memory, MiB", False, lambda v: f"{v / MIB:.1f}"),
    ("switches", "context switches", False, lambda v: f"{v:.4f}"),
]
IDLE = [
    ("bytes", "bytes each", False, lambda v: f"{v:,.0f}"),
    ("rest_cpu", "CPU at rest, %", False, lambda v: f"{v:.3f}"),
    ("rest_switches", "context switches/s at rest", False, lambda v: f"{v:.1f}"),
    ("peak", "peak memory, MiB", False, lambda v: f"{v / MIB:.1f}"),
]
# What is a means and no end: a difference here matters when it shows in one of the others.
MEANS = ("switches", "system_calls", "rest_switches")
# Differences so small are none, however large the ratio of two small numbers is.
LEAST = {"switches": 0.01, "system_calls": 0.01, "rest_cpu": 0.05, "rest_switches": 2.0}
# Nearer to 1 than this is alike, whatever the spread was.
ALIKE = 0.01
# With one round there is no spread: only what is further off than this is called a loss.
ALONE = 0.10
STEADY = ("near", "far")


class Figures:
    """The runs, by cell and peer; of several attempts in a round the last, which is the steady one if there was one."""

    def __init__(self, data):
        self.runs = {}
        self.base = {}
        self.wanted = {}
        for run in data["runs"]:
            self.runs.setdefault((run["cell"], run["peer"]), {})[run["round"]] = run
            if run["peer"] == BASE:
                self.base.setdefault((run["cell"], run["round"]), []).append(run)
            if run["state"] in STEADY:
                states = self.wanted.setdefault(run["cell"], [])
                states.append(run["state"])

    def state(self, cell):
        """The state in which most runs of the cell were made."""
        states = self.wanted.get(cell)
        return max(STEADY, key=states.count) if states else None

    def of(self, cell, peer, key):
        """Values, and whether all come from the state in which most of the cell's runs were made."""
        runs = [run for run in self.runs.get((cell, peer), {}).values() if run.get(key) is not None]
        steady = [run for run in runs if run["state"] == self.state(cell)]
        return [run[key] for run in steady or runs], bool(steady)

    def broken(self, cell, peer):
        """Whether it failed somebody in this cell: what it did for the others is then no feat."""
        runs = self.runs.get((cell, peer), {}).values()
        return any(run["errors"] or run.get("unserved") or run.get("slow_missing_bytes") for run in runs)

    def ratios(self, cell, peer, key):
        """peer / corelane within each round, in the same state; and whether that could be had."""
        pairs, loose = [], []
        for turn, run in sorted(self.runs.get((cell, peer), {}).items()):
            others = [base for base in self.base.get((cell, turn), []) if base.get(key)]
            if run.get(key) is None or not others:
                continue
            same = [base for base in others if base["state"] == run["state"] and run["state"] in STEADY]
            (pairs if same else loose).append(run[key] / (same or others)[-1][key])
        return (pairs, True) if pairs else (loose, False)


def ahead(ratios, more_is_better):
    """Whether a peer is ahead of corelane in every round, and by more than the rounds differ among themselves."""
    if not ratios:
        return False
    gains = [ratio if more_is_better else 1 / ratio if ratio else float("inf") for ratio in ratios]
    middle = statistics.median(gains)
    if len(gains) == 1:
        return middle > 1 + ALONE
    return min(gains) > 1 and middle - 1 > max(ALIKE, (max(gains) - min(gains)) / 2)


def ratio_text(ratios, sure):
    if not ratios:
        return ""
    text = f"{statistics.median(ratios):.2f}"
    if len(ratios) > 1:
        text += f" ({min(ratios):.2f} to {max(ratios):.2f})"
    return text + ("" if sure else " *")


def median_text(values, sure, form):
    if not values:
        return ""
    return form(statistics.median(values)) + ("" if sure else " *")


def metrics_of(cell):
    return IDLE if cell["kind"] == "idle" else METRICS


def losses(data, figures, wanted):
    """One row for each cell and column in which somebody is ahead; the furthest first."""
    lines = ["| cell | what | corelane | who is ahead: its figure, peer ÷ corelane within a round |", "|---|---|--:|---|"]
    for cell in data["cells"]:
        calls = data["system_calls"].get(cell["name"], {})
        for key, column, more, form in [*metrics_of(cell), ("system_calls", "system calls", False, "{:.3f}".format)]:
            if (key in MEANS) == wanted:
                continue
            rows = []
            for peer in data["peers"]:
                if peer.startswith(BASE):
                    continue
                if key == "system_calls":
                    both = peer in calls and calls.get(BASE)
                    ratios, sure = ([calls[peer] / calls[BASE]] if both else []), True
                    theirs, ours = [calls.get(peer, 0)], [calls.get(BASE, 0)]
                else:
                    ratios, sure = figures.ratios(cell["name"], peer, key)
                    theirs, ours = figures.of(cell["name"], peer, key)[0], figures.of(cell["name"], BASE, key)[0]
                if not ratios or not ahead(ratios, more):
                    continue
                text = ratio_text(ratios, sure) + (" †" if figures.broken(cell["name"], peer) else "")
                if abs(statistics.median(theirs) - statistics.median(ours)) > LEAST.get(key, 0):
                    rows.append((statistics.median(ratios), peer, text, form(statistics.median(theirs))))
            rows.sort(reverse=more)
            if rows:
                ours = form(statistics.median(ours))
                peers = "; ".join(f"**{peer}** {theirs}, {text}" for _, peer, text, theirs in rows)
                lines.append(f"| {cell['title']} | {column} | {ours} | {peers} |")
    return lines if len(lines) > 2 else ["None."]


def cell_table(data, figures, cell):
    metrics = metrics_of(cell)
    idle = cell["kind"] == "idle"
    calls = data["system_calls"].get(cell["name"], {})
    unit = cell["unit"]
    head = ["server", *(column for _, column, _, _ in metrics)]
    if not idle:
        head += ["system calls", "server busy", "load: CPU, µs", "load busy", "rate ÷ corelane"]
    head += ["memory ÷ corelane" if idle else "CPU ÷ corelane", "states", "errors"]
    if idle:
        lines = [f"### {cell['title']}", ""]
    else:
        lines = [f"### {cell['title']}", "", f"CPU, context switches and system calls are per {unit}.", ""]
    lines += [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(head) - 1) + "|"]
    name = cell["name"]
    for peer in data["peers"]:
        runs = figures.runs.get((name, peer))
        if not runs:
            continue
        row = [peer, *(median_text(*figures.of(name, peer, key), form) for key, _, _, form in metrics)]
        if not idle:
            row.append(f"{calls[peer]:.3f}" if peer in calls else "")
            row.append(median_text(*figures.of(name, peer, "busy"), lambda v: f"{v:.0%}"))
            row.append(median_text(*figures.of(name, peer, "load_cpu"), lambda v: f"{v:.2f}"))
            row.append(median_text(*figures.of(name, peer, "load_busy"), lambda v: f"{v:.0%}"))
            row.append(ratio_text(*figures.ratios(name, peer, "rate")))
        row.append(ratio_text(*figures.ratios(name, peer, "bytes" if idle else "cpu")))
        states = [run["state"] for run in runs.values()]
        row.append(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
        row.append(str(sum(run["errors"] for run in runs.values())))
        unserved = max((run.get("unserved") or 0 for run in runs.values()), default=0)
        if unserved:
            row[-1] += f"; up to {unserved} of {cell['fast']} connections had no reply in the window"
        missing = sum(run.get("slow_missing_bytes") or 0 for run in runs.values())
        if missing:
            row[-1] += f"; {missing / MIB:,.0f} MiB never came back to the slow readers"
        lines.append(f"| {' | '.join(row)} |")
    own = sum(run.get("load_errors") or 0 for where in figures.runs if where[0] == name for run in figures.runs[where].values())
    if own:
        lines += ["", f"The load tool counted {own} errors of its own (messages that it sent late, mostly)."]
    reasons = {f"{peer}: {reason}" for (where, peer), runs in figures.runs.items() if where == name
               for run in runs.values() for reason in run.get("verdict") or []}
    if reasons:
        lines += ["", "Said by the load tool: " + "; ".join(sorted(reasons)) + "."]
    return [*lines, "", f"Spread between rounds, (greatest − least) ÷ median, server CPU: {spread(data, figures, cell)}.", ""]


def spread(data, figures, cell):
    key = "bytes" if cell["kind"] == "idle" else "cpu"
    spreads = []
    for peer in data["peers"]:
        values, _ = figures.of(cell["name"], peer, key)
        if len(values) > 1 and statistics.median(values) > 0:
            spreads.append((max(values) - min(values)) / statistics.median(values))
    if not spreads:
        return "one round, so none"
    return f"{statistics.median(spreads):.1%} (median of the servers), {max(spreads):.1%} at most".replace(
        "server CPU", "memory")


def who(data):
    lines = ["| server | what it is | backend | proof: open descriptors | what it says of its driver |", "|---|---|---|---|---|"]
    for name, info in data["peers"].items():
        found = info["open"]
        lines.append(f"| {name} | {info['runtime']} | {info['backend']} | {found['io_uring']} io_uring, {found['epoll']} epoll "
                     f"| {info['driver']} |")
    return lines


def load_check(data):
    if not data["load_check"]:
        return []
    lines = ["## The load tools against each other", "",
             "The same server under `corelane load` and under `client echo`, which shares no code with it; 64 B.", "",
             "| server | connections | tool | per second | p50, µs | p99, µs | server CPU, µs | the tool's CPU, µs | errors |",
             "|---|--:|---|--:|--:|--:|--:|--:|--:|"]
    for one in data["load_check"]:
        cpu = f"{one['cpu']:.3f}" if one["cpu"] is not None else ""
        own = f"{one['load_cpu']:.3f}" if one["load_cpu"] is not None else ""
        lines.append(f"| {one['peer']} | {one['connections']} | {one['tool']} | {one['rate']:,.0f} | {one['p50']:,.0f} "
                     f"| {one['p99']:,.0f} | {cpu} | {own} | {one['errors']} |")
    return [*lines, ""]


def states(data):
    labels = [run["state"] for run in data["runs"]]
    counts = ", ".join(f"{labels.count(label)} {label}" for label in ("near", "far", "moved", "noisy"))
    trips = [trip for run in data["runs"] for trip in run["round_trip_ns"]]
    text = f"{len(labels)} runs: {counts}."
    if trips:
        text += f" A cache line to the other core and back: {min(trips):.0f} to {max(trips):.0f} ns, median {statistics.median(trips):.0f}."
    return text


def render(data):
    figures = Figures(data)
    box, config = data["machine"], data["config"]
    lines = [
        "# corelane beside other runtimes", "",
        f"Made by `benches/peers/run.py` on {box['date']} UTC. {box['cpu']}, {box['cores']} cores, {box['memory_gib']} GiB, "
        f"Linux {box['kernel']}, congestion control {box['congestion_control']}. Server on core 0 with one worker, load on core 1, "
        f"loopback. {config['rounds']} round(s), {config['seconds']:g} s a window after {config['warmup']:g} s of warm-up, the order "
        "turning every round. Medians; ratios are taken within a round: median (range).", "",
        states(data), "`near` and `far` are the two places that the host gives the cores; ratios compare like with like. `moved` and "
        "`noisy` runs were repeated; `*` marks a figure for which no steady run was had.", "",
    ]
    if config.get("quick"):
        lines += ["**A quick run: it shows that everything works, its figures mean nothing.**", ""]
    lines += ["## Losses first", "",
              "Every cell and column in which a peer is ahead of corelane (callbacks, io_uring) in every round and by more than half of what "
              f"the rounds differ (with one round: by more than {ALONE:.0%}). The floor is not a peer, and is listed all the same. † failed some connections of the cell.", "",
              *losses(data, figures, True), "",
              "The same for what is a means and no end (context switches and system calls per message; differences below 0.01 left out):", "",
              *losses(data, figures, False), ""]
    lines += ["## Who takes part", "", *who(data), ""]
    if data["failures"]:
        lines += ["## What failed", ""]
        lines += [f"* {failure['peer']}, {failure['where']}: {failure['error']}" for failure in data["failures"]]
        lines.append("")
    lines += ["## All cells", ""]
    for cell in data["cells"]:
        lines += cell_table(data, figures, cell)
    lines += load_check(data)
    return "\n".join(lines).rstrip() + "\n"
