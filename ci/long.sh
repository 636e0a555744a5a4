#!/usr/bin/env bash
# What is too long for every change, one after the other: the search over 10,000 seeds, guard mode, the mailbox
# in every interleaving, both sanitizers. About an hour on two cores. Goes on after a failure and ends with a
# summary; what this machine has no toolchain for is skipped with the reason.
#
#   ci/long.sh [soak|guard|loom|asan|tsan ...]     all of them by default
set -uo pipefail
cd "$(dirname "$0")/.."
toolchain=${TOOLCHAIN:-nightly}
[ $# -gt 0 ] || set -- soak guard loom asan tsan
summary=()
failed=0
for what in "$@"; do
    [ -e "ci/$what.sh" ] || { echo "usage: ci/long.sh [soak|guard|loom|asan|tsan ...]" >&2; exit 2; }
    from=$SECONDS outcome=ok
    printf '\n== %s\n' "$what"
    case $what in
        asan | tsan)
            if ! cargo "+$toolchain" --version >/dev/null 2>&1; then
                summary+=("$what skipped: no toolchain '$toolchain' (rustup toolchain install $toolchain, or TOOLCHAIN=)")
                continue
            fi
            source=$(rustc "+$toolchain" --print sysroot)/lib/rustlib/src/rust/library
            if [ "$what" = tsan ] && [ ! -d "$source" ]; then
                summary+=("$what skipped: no standard library source (rustup component add rust-src --toolchain $toolchain)")
                continue
            fi ;;
    esac
    bash "ci/$what.sh" || { outcome=FAILED; failed=1; }
    summary+=("$(printf '%-6s %-7s %5d s' "$what" "$outcome" $((SECONDS - from)))")
done
printf '\n'
printf '%s\n' "${summary[@]}"
exit "$failed"
