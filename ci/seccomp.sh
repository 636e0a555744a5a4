#!/usr/bin/env bash
# Where io_uring is forbidden: the conformance suite on epoll, and on what Backend::Auto comes to, under system
# call filters that answer EPERM (as Docker and containerd do) and ENOSYS (as gVisor does).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(uname -s)" != Linux ]; then
    echo "skipped: seccomp filters are Linux's"
    exit 0
fi
# The path of a test program, as cargo tells it.
program() {
    cargo test --no-run --test "$1" --message-format=json \
        | sed -n 's/.*"executable":"\([^"]*\/'"$1"'-[0-9a-f]*\)".*/\1/p' | tail -n 1
}
wrapper=$(program fallback)
suite=$(program conformance)
[ -x "$wrapper" ] && [ -x "$suite" ] || { echo "the test programs are missing" >&2; exit 1; }

# Both results must show that tests ran and passed: a filter under which nothing runs proves nothing.
under() {
    local answer=$1 log
    shift
    log=$(mktemp)
    echo "-- io_uring answers $answer: conformance $*"
    if ! CORELANE_ANSWER=$answer CORELANE_RUN="$suite $* --nocapture" \
        "$wrapper" --exact run_under_a_filter --ignored --nocapture --test-threads=1 >"$log" 2>&1; then
        cat "$log"
        exit 1
    fi
    grep -E '^test result: ok\. [1-9][0-9]+ passed; 0 failed' "$log" || { cat "$log"; exit 1; }
    if grep -q 'skipped: .*io_uring' "$log"; then
        grep -o 'skipped: .*' "$log" | sort | uniq -c >&2
        echo "scenarios were skipped that should have run on epoll" >&2
        exit 1
    fi
    rm -f "$log"
}
unset CORELANE_BACKEND
export CORELANE_EXPECT_BACKEND=epoll
for answer in EPERM ENOSYS; do
    under "$answer" epoll::
    under "$answer" auto:: --ignored
done
