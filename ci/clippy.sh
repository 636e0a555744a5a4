#!/usr/bin/env bash
# No warning of the compiler or of clippy, with and without the tool, tests and examples included.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo clippy --all-targets -- -D warnings
cargo clippy --all-targets --all-features -- -D warnings
