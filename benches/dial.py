#!/usr/bin/env python3
"""What each way of waiting costs and brings: medians of interleaved rounds, a table and a picture.

    cargo build --release --features cli
    python3 benches/dial.py target/release/corelane [ROUNDS] [PICTURE.svg]

Server on core 0, load generator on core 1. The order of the settings turns every round; ratios are to
`block` within a round, their median and their range.
"""
import statistics
import sys

from common import run

CELLS = [
    ("one connection, closed loop, 64 B", "echo", ["echo", "-c", "1", "--size", "64"],
     ["block", "spin=50us", "coalesce=200us", "adaptive=200us"]),
    ("64 connections, 20,000/s, 64 B", "echo", ["echo", "-c", "64", "--size", "64", "--rate", "20k/s"],
     ["block", "spin=50us", "coalesce=100us", "coalesce=200us", "coalesce=1ms", "adaptive=200us", "adaptive=1ms"]),
    ("64 connections, 100,000/s, 64 B", "echo", ["echo", "-c", "64", "--size", "64", "--rate", "100k/s"],
     ["block", "spin=50us", "coalesce=200us", "adaptive=200us"]),
    ("64 connections, closed loop, 64 B", "echo", ["echo", "-c", "64", "--size", "64"],
     ["block", "spin=50us", "coalesce=200us", "adaptive=200us"]),
    ("15,000 heartbeats every 5 s", "heartbeat",
     ["heartbeat", "-c", "15000", "--interval", "5s", "--source", "127.0.0.2-9", "--ramp", "5k/s"],
     ["block", "coalesce=1ms", "coalesce=5ms", "adaptive=5ms"]),
]


def measure(tool, rounds):
    """Every cell with every setting: the runs, by cell and setting."""
    result = []
    for name, kind, load, settings in CELLS:
        runs = {setting: [] for setting in settings}
        seconds = 10 if kind == "heartbeat" else 3
        for turn in range(rounds):
            start = turn % len(settings)
            for setting in settings[start:] + settings[:start]:
                runs[setting].append(run(tool, kind, load, ["--wait", setting], lambda environment: None, seconds))
        result.append((name, runs))
        show(name, runs)
    return result


def show(name, runs):
    """A cell as a Markdown table."""
    print(f"\n**{name}**\n")
    print("| wait | messages/s | server CPU, µs | ÷ block | p50, µs | ÷ block | p99, µs | ÷ block | p99.9, µs | calls/message |")
    print("|---|--:|--:|---|--:|---|--:|---|--:|--:|")
    for setting, each in runs.items():
        cells = [f"{statistics.median(one['rate'] for one in each):,.0f}"]
        for key, digits in (("cpu", 2), ("p50", 0), ("p99", 0)):
            cells.append(f"{statistics.median(one[key] for one in each):,.{digits}f}")
            ratios = sorted(one[key] / base[key] for one, base in zip(each, runs["block"]))
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        cells.append(f"{statistics.median(one['p99.9'] for one in each):,.0f}")
        cells.append(f"{statistics.median(one['calls'] for one in each):.3f}")
        print(f"| `{setting}` | {' | '.join(cells)} |", flush=True)


def picture(result, path):
    """Latency against CPU, a panel for each cell, as SVG."""
    width, height, left, gap = 340, 260, 60, 30
    panels = [cell for cell in result if "closed loop" not in cell[0] or "one" in cell[0]]
    total = len(panels) * (width + gap) + gap
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{height + 90}" '
             'font-family="sans-serif" font-size="11">',
             f'<rect width="{total}" height="{height + 90}" fill="white"/>']
    for index, (name, runs) in enumerate(panels):
        x0, y0 = gap + index * (width + gap), 40
        points = {setting: [statistics.median(one[key] for one in each) for key in ("cpu", "p50", "p99")]
                  for setting, each in runs.items()}
        most_cpu = max(point[0] for point in points.values()) * 1.1
        most_us = max(point[2] for point in points.values()) * 1.1
        span = width - left
        parts.append(f'<text x="{x0}" y="{y0 - 16}" font-size="13" font-weight="bold">{name}</text>')
        parts.append(f'<path d="M{x0 + left} {y0} V{y0 + height} H{x0 + width}" fill="none" stroke="#444"/>')
        for part in (0, 0.5, 1):
            y = y0 + height * (1 - part / 1.1)
            x = x0 + left + span * part / 1.1
            parts.append(f'<text x="{x0 + left - 6}" y="{y + 4}" text-anchor="end">{most_us / 1.1 * part:,.0f}</text>')
            parts.append(f'<text x="{x}" y="{y0 + height + 16}" text-anchor="middle">{most_cpu / 1.1 * part:.1f}</text>')
        parts.append(f'<text x="{x0 + left + span / 2}" y="{y0 + height + 34}" text-anchor="middle">'
                     'server CPU per message, µs</text>')
        parts.append(f'<text x="{x0 + 8}" y="{y0 + height / 2}" text-anchor="middle" '
                     f'transform="rotate(-90 {x0 + 8} {y0 + height / 2})">response p50 to p99, µs</text>')
        labels = []
        for setting, (cpu, p50, p99) in sorted(points.items(), key=lambda point: -point[1][2]):
            x = x0 + left + span * cpu / most_cpu
            low, high = (y0 + height * (1 - value / most_us) for value in (p50, p99))
            parts.append(f'<path d="M{x:.1f} {low:.1f} V{high:.1f}" stroke="#36c" stroke-width="2"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{low:.1f}" r="4" fill="#36c"/>')
            # To the left where there is no room to the right, and lower where another one stands already.
            side, anchor = (-7, "end") if x > x0 + left + span * 0.7 else (7, "start")
            y = high + 4
            while any(abs(y - other) < 12 and abs(x - at) < 90 for at, other in labels):
                y += 12
            labels.append((x, y))
            parts.append(f'<text x="{x + side:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
                         f'{setting.replace("us", "µs")}</text>')
    parts.append("</svg>")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n")


if __name__ == "__main__":
    measured = measure(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
    if len(sys.argv) > 3:
        picture(measured, sys.argv[3])
