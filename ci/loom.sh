#!/usr/bin/env bash
# The mailbox itself, on loom's atomics, in every interleaving that a few forced switches allow. An optimized
# build, because there are millions of them.
set -euo pipefail
cd "$(dirname "$0")/.."
export RUSTFLAGS="${RUSTFLAGS:-} --cfg loom"
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16
cargo test --release --lib worker::mailbox::model -- "$@"
