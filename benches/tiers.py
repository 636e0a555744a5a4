#!/usr/bin/env python3
"""The same server as async tasks and as callbacks: medians of interleaved rounds.

    cargo build --release --features cli
    python3 benches/tiers.py target/release/corelane [ROUNDS]

Server on core 0, load generator (callbacks) on core 1. The order of the tiers turns around every round.
Prints a Markdown table; ratios are async / handler within a round, their median and their range.
"""
import sys

from common import compare

compare(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5, "tier", "--tier", "async", "handler")
