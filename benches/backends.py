#!/usr/bin/env python3
"""The same server on io_uring and on epoll: medians of interleaved rounds.

    cargo build --release --features cli
    python3 benches/backends.py target/release/corelane [ROUNDS]

Server on core 0, load generator (always on the best backend) on core 1. The order of the backends turns
around every round. Prints a Markdown table; ratios are io_uring / epoll within a round, their median and
their range.
"""
import sys

from common import compare

compare(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5, "backend", "--backend", "io_uring", "epoll")
