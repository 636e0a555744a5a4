"""What the tables call ahead, and which runs they compare: `python3 -m unittest discover benches/peers`."""
import unittest

import table


def run(peer, turn, state, cpu, attempt=0):
    return {"cell": "c", "peer": peer, "round": turn, "attempt": attempt, "state": state, "cpu": cpu, "rate": 1e6 / cpu,
            "p50": 1.0, "p99": 1.0, "p99.9": 1.0, "peak": 1 << 20, "switches": 0.0, "errors": 0,
            "round_trip_ns": [100.0, 100.0]}


def data(runs, calls=None):
    peers = {name: {"runtime": name, "backend": "epoll", "open": {"io_uring": 0, "epoll": 1}, "driver": ""}
             for name in dict.fromkeys(each["peer"] for each in runs)}
    box = dict.fromkeys(("date", "cpu", "cores", "memory_gib", "kernel", "congestion_control"), "")
    return {"machine": box, "config": {"rounds": 2, "seconds": 1.0, "warmup": 0.5}, "peers": peers, "runs": runs,
            "cells": [{"name": "c", "title": "the cell", "unit": "message", "kind": "load"}],
            "system_calls": {"c": calls or {}}, "failures": [], "load_check": []}


class Ahead(unittest.TestCase):
    def test_a_peer_is_ahead_only_in_every_round_and_beyond_the_spread(self):
        self.assertTrue(table.ahead([0.90, 0.92, 0.91], False))
        self.assertFalse(table.ahead([0.90, 1.01, 0.91], False), "not in every round")
        self.assertFalse(table.ahead([0.99, 0.80, 0.98], False), "by less than the rounds differ")
        self.assertFalse(table.ahead([0.995, 0.996], False), "alike")
        self.assertTrue(table.ahead([1.10, 1.12], True))
        self.assertFalse(table.ahead([1.10, 1.12], False))

    def test_one_round_calls_only_what_is_far_off_a_loss(self):
        self.assertFalse(table.ahead([0.95], False))
        self.assertTrue(table.ahead([0.85], False))
        self.assertFalse(table.ahead([], False))


class Pairs(unittest.TestCase):
    def test_ratios_are_taken_within_a_round_and_a_state(self):
        figures = table.Figures(data([
            run("corelane", 0, "near", 2.0), run("tokio", 0, "far", 3.0), run("corelane", 0, "far", 4.0, 1),
            run("corelane", 1, "near", 2.0), run("tokio", 1, "near", 3.0),
        ]))
        self.assertEqual(figures.ratios("c", "tokio", "cpu"), ([0.75, 1.5], True))

    def test_without_a_steady_pair_the_ratio_is_marked(self):
        figures = table.Figures(data([run("corelane", 0, "near", 2.0), run("tokio", 0, "noisy", 3.0)]))
        self.assertEqual(figures.ratios("c", "tokio", "cpu"), ([1.5], False))
        self.assertTrue(table.ratio_text([1.5], False).endswith("*"))

    def test_a_loss_is_listed_and_a_tiny_difference_is_not(self):
        runs = [run("corelane", 0, "near", 2.0), run("tokio", 0, "near", 1.0)]
        self.assertIn("**tokio** 1.000, 0.50", table.render(data(runs)))
        self.assertNotIn("| system calls | 0.010", table.render(data(runs, {"corelane": 0.01, "tokio": 0.005})))
        self.assertIn("| system calls | 2.000 | **tokio** 1.000", table.render(data(runs, {"corelane": 2.0, "tokio": 1.0})))


if __name__ == "__main__":
    unittest.main()
