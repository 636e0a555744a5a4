#!/usr/bin/env python3
"""corelane against other runtimes and against a hand-written ring loop, side by side. README.md says what is what.

    cargo build --release --features cli
    cargo build --release --manifest-path benches/peers/Cargo.toml
    python3 benches/peers/run.py --out target/peers                 # a whole run
    python3 benches/peers/run.py --quick --out target/peers-quick   # whether everything works
    python3 benches/peers/run.py --cells c64x64,c8000x64 --peers tokio,mio,floor --rounds 5 --out target/peers-some
    python3 benches/peers/run.py --render target/peers.json         # the tables again, from the figures
"""
import argparse
import contextlib
import json
import os
import sys
import time

import cells as all_the_cells
import machine
import table
from servers import PEERS, Server, check_echo, corelane

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BASE = "corelane"


def arguments():
    target = os.environ.get("CARGO_TARGET_DIR")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(ROOT, "target", "peers"), help="writes OUT.json and OUT.md")
    parser.add_argument("--corelane", default=os.path.join(target or os.path.join(ROOT, "target"), "release", "corelane"))
    parser.add_argument("--directory", default=os.path.join(target or os.path.join(HERE, "target"), "release"),
                        help="where the peers' binaries are")
    parser.add_argument("--cells", help="names, with commas; see --list")
    parser.add_argument("--peers", help="names, with commas; corelane always takes part")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--warmup", type=float, default=0.7)
    parser.add_argument("--rest", type=float, default=5.0, help="how long idle connections are watched")
    parser.add_argument("--retries", type=int, default=2, help="runs repeated when the machine's state moved")
    parser.add_argument("--corelane-args", default="", help="more options of every `corelane serve`, in one argument")
    parser.add_argument("--variant", action="append", default=[], metavar="NAME=OPTIONS",
                        help="corelane once more, with other options: spin='--wait spin=100us' takes part as corelane-spin")
    parser.add_argument("--no-system-calls", action="store_true", help="leave out the short runs that count them")
    parser.add_argument("--no-load-check", action="store_true", help="leave out the check of the two load tools against each other")
    parser.add_argument("--quick", action="store_true", help="one short round over fewer cells: whether everything works")
    parser.add_argument("--list", action="store_true", help="the names of cells and peers")
    parser.add_argument("--render", metavar="JSON", help="only writes the tables again")
    return parser.parse_args()


def chosen(names, available, what):
    """The ones that were named, in the order given."""
    by_name = {each.name: each for each in available}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        sys.exit(f"no such {what}: {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names]


def say(text):
    print(text, file=sys.stderr, flush=True)


class Bench:
    """A run of everything; its figures are on disk after every cell."""

    def __init__(self, args):
        self.args = args
        self.tools = all_the_cells.Tools(args.corelane, os.path.join(args.directory, "client"))
        every_cell = all_the_cells.all_cells()
        if args.cells:
            self.cells = chosen(args.cells.split(","), every_cell, "cell")
        elif args.quick:
            self.cells = chosen(all_the_cells.QUICK, every_cell, "cell")
        else:
            self.cells = every_cell
        if args.peers:
            self.peers = chosen(list(dict.fromkeys([BASE, *args.peers.split(",")])), PEERS, "peer")
        else:
            self.peers = [peer for peer in PEERS if peer.default]
        for variant in args.variant:
            name, separator, options = variant.partition("=")
            if not separator:
                sys.exit(f"--variant {variant}: expected NAME=OPTIONS")
            self.peers.append(corelane(f"{BASE}-{name}", *options.split()))
        missing = {path for path in (self.tools.corelane, self.tools.client,
                                     *(os.path.join(args.directory, peer.binary) for peer in self.peers if peer.binary != BASE))
                   if not os.path.exists(path)}
        if missing:
            sys.exit(f"not built (the commands are at the top of --help): {', '.join(sorted(missing))}")
        self.state = machine.State(self.tools.client)
        self.data = {
            "schema": "corelane-peers/1",
            "machine": machine.describe(),
            "config": {key: value for key, value in vars(args).items() if key not in ("corelane", "directory", "out", "list", "render")},
            "cells": [{"name": cell.name, "title": cell.title, "unit": cell.unit, "kind": cell.tool, "fast": cell.connections}
                      for cell in self.cells],
            "peers": {}, "failures": [], "runs": [], "system_calls": {}, "load_check": [],
        }

    def extra(self, peer):
        return self.args.corelane_args.split() if peer.binary == "corelane" else []

    def server(self, peer, mode):
        return Server(peer, mode, self.tools, self.args.directory, self.extra(peer))

    def fail(self, peer, where, error):
        say(f"{peer.name}, {where}: {error}")
        self.data["failures"].append({"peer": peer.name, "where": where, "error": str(error)[:500]})

    def check(self):
        """Who echoes what was sent takes part."""
        good = []
        for peer in self.peers:
            try:
                with self.server(peer, "echo") as server:
                    check_echo(server.address)
                    self.data["peers"][peer.name] = {**server.info, "backend": peer.backend}
                good.append(peer)
            except (RuntimeError, OSError) as error:
                self.fail(peer, "the check of its echo", error)
        if not any(peer.name == BASE for peer in good):
            sys.exit("without corelane there is nothing to compare with")
        self.peers = good

    def one(self, cell, peer, turn, attempt):
        """One run of one server under one load."""
        args = self.args
        began = self.state.begin()
        with self.server(peer, cell.mode) as server:
            result = all_the_cells.measure(cell, server, self.tools, args.seconds, args.warmup, args.rest)
            whole = machine.sample(server.pid)
            used = self.state.stop(began, whole[1] if whole else 0.0)
        # Without the server: one that is busy at rest would disturb the measurement.
        state = self.state.end(used)
        run = {"cell": cell.name, "peer": peer.name, "round": turn, "attempt": attempt, **state, **result}
        self.data["runs"].append(run)
        rate = f"{run['rate']:>10,.0f}/s" if run.get("rate") is not None else f"{run['bytes']:>8,.0f} B each"
        cpu = f"{run['cpu']:8.3f} µs" if run.get("cpu") is not None else ""
        say(f"  {turn + 1}.{attempt} {cell.name:12} {peer.name:15} {rate} {cpu} {state['state']}"
            f"{' ERRORS: %d' % run['errors'] if run['errors'] else ''}")
        return run

    def until_steady(self, cell, peer, turn):
        """Again while the machine's state moved in the middle of it."""
        run = None
        for attempt in range(self.args.retries + 1):
            try:
                run = self.one(cell, peer, turn, attempt)
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                self.fail(peer, f"{cell.name}, round {turn + 1}", error)
                return None
            if run["state"] in ("near", "far"):
                break
        return run

    def round(self, turn):
        for cell in self.cells:
            peers = [peer for peer in self.peers if peer.only is None or cell.name in peer.only]
            # A B C, then B C A, so that nobody is always first after a pause, or next to the same one.
            shift = turn * max(1, len(peers) // max(1, self.args.rounds)) % len(peers)
            order = peers[shift:] + peers[:shift]
            runs = {peer.name: self.until_steady(cell, peer, turn) for peer in order}
            base = runs.get(BASE)
            states = {run["state"] for run in runs.values() if run}
            if base and states & {"near", "far"} - {base["state"]}:
                # Some were measured in another state than corelane: it is measured in that one, too, if it lasts.
                self.until_steady(cell, next(peer for peer in peers if peer.name == BASE), turn)
            if turn == 0 and not self.args.no_system_calls:
                self.system_calls(cell, peers)
            self.write()

    def system_calls(self, cell, peers):
        found = self.data["system_calls"].setdefault(cell.name, {})
        for peer in peers:
            with contextlib.suppress(RuntimeError, OSError, ValueError, KeyError):
                with self.server(peer, cell.mode) as server:
                    calls = all_the_cells.system_calls(cell, server, self.tools, min(1.0, self.args.seconds))
                if calls is not None:
                    found[peer.name] = calls

    def load_check(self):
        """The same server under both load tools, which have nothing in common but the language."""
        for peer in [peer for peer in self.peers if peer.name in (BASE, "tokio")]:
            for connections in (1, 64):
                size = all_the_cells.Cell("check", "", "load", ["-c", str(connections), "--size", "64"], connections)
                for tool in ("corelane load", "client"):
                    try:
                        with self.server(peer, "echo") as server:
                            if tool == "client":
                                options = ["echo", "--connections", str(connections), "--size", "64"]
                                found = all_the_cells.by_client(
                                    size, server, self.tools, self.args.seconds, self.args.warmup, options)
                            else:
                                found = all_the_cells.by_load(size, server, self.tools, self.args.seconds, self.args.warmup)
                        self.data["load_check"].append(
                            {"peer": peer.name, "connections": connections, "tool": tool, **found})
                    except (RuntimeError, OSError, ValueError, KeyError) as error:
                        self.fail(peer, f"check of {tool}", error)

    def write(self):
        write(self.data, self.args.out)

    def run(self):
        self.check()
        for turn in range(self.args.rounds):
            start = time.monotonic()
            self.round(turn)
            say(f"round {turn + 1} of {self.args.rounds} took {time.monotonic() - start:.0f} s")
            if turn == 0 and not self.args.no_load_check:
                self.load_check()
                self.write()
        say(f"{self.args.out}.md and {self.args.out}.json are written")


def write(data, out):
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    for suffix, text in ((".json", json.dumps(data, indent=1)), (".md", table.render(data))):
        # A reader never sees half a file.
        with open(f"{out}{suffix}.tmp", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{out}{suffix}.tmp", f"{out}{suffix}")


def main():
    args = arguments()
    if args.list:
        for cell in all_the_cells.all_cells():
            print(f"cell {cell.name:12} {cell.title}")
        for peer in PEERS:
            print(f"peer {peer.name:15} {peer.backend}{'' if peer.default else ', on request'}"
                  f"{', only ' + ', '.join(peer.only) if peer.only else ''}")
        return
    if args.render:
        with open(args.render, encoding="utf-8") as file:
            write(json.load(file), args.render.removesuffix(".json"))
        return
    if args.quick:
        args.rounds, args.seconds, args.warmup, args.rest, args.retries = 1, 0.5, 0.2, 1.0, 0
    # Away from the server's core: this program sleeps nearly always.
    os.sched_setaffinity(0, {all_the_cells.LOAD_CPU})
    Bench(args).run()


if __name__ == "__main__":
    main()
