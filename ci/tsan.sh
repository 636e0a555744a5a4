#!/usr/bin/env bash
# Everything that threads share (mailboxes, wakers of drivers and of tasks, outcomes and calls that cross threads, the
# end of a runtime) under ThreadSanitizer, with an
# instrumented standard library. What this proves and what not: docs/memory-proof.md. Needs a nightly
# toolchain with its rust-src component; TOOLCHAIN names another one.
set -euo pipefail
cd "$(dirname "$0")/.."
toolchain=${TOOLCHAIN:-nightly}
cargo "+$toolchain" --version
export RUSTFLAGS="${RUSTFLAGS:-} -Zsanitizer=thread"
export TSAN_OPTIONS="halt_on_error=0:second_deadlock_stack=1"
# Finding the names for a panic's backtrace takes an instrumented library up to half a minute.
export RUST_BACKTRACE=0
run() { cargo "+$toolchain" test -Zbuild-std --target x86_64-unknown-linux-gnu "$@"; }
run --lib worker::mailbox
run --lib driver::uring::tests::submit
run --lib task::
run --test task_wakers --test task_remote --test task_blocking --test task_runtime
run --test uring_mailbox --test uring_shutdown --test promises_threads "$@"
