#!/usr/bin/env bash
# The suite under AddressSanitizer, with its leak detector. What this proves and what not:
# docs/memory-proof.md. Needs a toolchain that takes -Z flags; TOOLCHAIN names another one.
set -euo pipefail
cd "$(dirname "$0")/.."
toolchain=${TOOLCHAIN:-nightly}
cargo "+$toolchain" --version
suite=()
for file in tests/uring_*.rs tests/promises_*.rs tests/sim_*.rs tests/task_*.rs; do
    suite+=(--test "$(basename "$file" .rs)")
done
skipped=(
    # It limits the address space (ulimit -v), of which the sanitizer's shadow takes 16 TiB.
    --skip buffers_that_no_memory_can_hold_are_refused
    # It measures how many kernel entries a message costs at full speed.
    --skip at_full_load_of_64_connections_one_enter_serves_many_messages
)
export RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=address"
# A test that measures how deep callbacks nest looks at addresses of locals, which
# detect_stack_use_after_return moves to the heap.
export ASAN_OPTIONS="detect_leaks=1:detect_stack_use_after_return=0:abort_on_error=0"
export LSAN_OPTIONS="suppressions=$PWD/ci/lsan.supp:print_suppressions=0"
# A target is named so that build scripts and macros are not built for it.
cargo "+$toolchain" test --target x86_64-unknown-linux-gnu --lib "${suite[@]}" "$@" -- "${skipped[@]}"
