#!/usr/bin/env bash
# A library user gets four small crates and what they need, nothing of the tool.
set -euo pipefail
cd "$(dirname "$0")/.."
tree=$(cargo tree --edges normal --prefix none --no-default-features | awk '{print $1}' | sort -u | tr '\n' ' ')
wanted="bitflags cfg-if corelane crossbeam-queue crossbeam-utils io-uring libc "
if [ "$tree" != "$wanted" ]; then
    echo "the dependency tree of the default features is not what it should be" >&2
    echo "  is:     $tree" >&2
    echo "  should: $wanted" >&2
    exit 1
fi
# `unsafe` stays in the two rooms that SAFETY.md is about, and in one file.
strays=$(grep -rnE '\bunsafe (\{|fn|impl)' src --include='*.rs' | grep -vE '^src/(buffer/|driver/|task/waker\.rs:)' || true)
if [ -n "$strays" ]; then
    printf 'unsafe code outside src/buffer, src/driver and src/task/waker.rs:\n%s\n' "$strays" >&2
    exit 1
fi
