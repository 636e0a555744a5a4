#!/usr/bin/env bash
# benches/peers: formatted, no lint, its tables' own tests, and every server starts on the backend that it is said to
# have and echoes every byte. Builds all peers; not a part of the default run.
set -euo pipefail
cd "$(dirname "$0")/.."
manifest=benches/peers/Cargo.toml
cargo fmt --manifest-path "$manifest" --all --check
cargo clippy --release --locked --manifest-path "$manifest" --all-targets -- -D warnings
python3 -m unittest discover -s benches/peers
cargo build --release --features cli
cargo build --release --locked --manifest-path "$manifest"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
python3 benches/peers/run.py --quick --cells c16x1024,stream1,slow --no-system-calls --no-load-check --out "$out/peers"
# One that did not start, fell back, or sent other bytes than it got is listed there.
if grep -q '^## What failed' "$out/peers.md"; then
    sed -n '/^## What failed/,/^## All/p' "$out/peers.md" >&2
    exit 1
fi
