#!/usr/bin/env bash
# The suite in guard mode: every I/O buffer on pages of its own, which are inaccessible while nobody has the
# buffer. A late write of the kernel ends with EFAULT, which aborts the test program; a late touch of this
# process is a SIGSEGV. What this proves and what not: docs/memory-proof.md.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=()
for file in tests/uring_*.rs tests/promises_*.rs tests/sim_*.rs tests/task_*.rs tests/conformance; do
    case $file in
        # Allocations and kernel entries of millions of messages, with a patience that four mprotect calls a
        # message exceed. The same code runs in the other tests.
        tests/promises_zero_alloc.rs | tests/promises_task_alloc.rs) ;;
        *) suite+=(--test "$(basename "$file" .rs)") ;;
    esac
done
skipped=(
    # It wants a warning about a registration that this mode does not try.
    --skip too_little_lockable_memory_is_one_warning_that_says_what_is_lost
)
export CORELANE_GUARD_BUFFERS=1
cargo test --lib "${suite[@]}" "$@" -- "${skipped[@]}"
