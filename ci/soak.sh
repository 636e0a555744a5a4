#!/usr/bin/env bash
# The long search: every scenario of tests/sim_* under 10,000 seeds, or as many as asked for (a number, or
# a range: 20000..30000), and cancellation on the real kernel under a fiftieth as many. Optimised, with
# overflow checks and debug assertions; some minutes. The quick search, some hundreds of seeds, is part of `cargo test`.
set -euo pipefail
cd "$(dirname "$0")/.."
asked=${1:-10000}
case $asked in
    *..*) range=$asked ;;
    *) range=0..$asked ;;
esac
seeds=$((${range#*..} - ${range%..*}))
export CARGO_PROFILE_TEST_OPT_LEVEL=2 CARGO_PROFILE_TEST_DEBUG=line-tables-only
export CORELANE_SIM_SEEDS=$range
# What runs on the real kernel waits for it most of the time.
real=$((seeds / 50 > 0 ? seeds / 50 : 1))
export CORELANE_CANCEL_SEEDS=${range%..*}..$((${range%..*} + real))
target=${CARGO_TARGET_DIR:-target}/soak
files=()
for file in tests/sim_*.rs; do
    files+=("$(basename "$file" .rs)")
done
cargo test --quiet --target-dir "$target" --no-run "${files[@]/#/--test=}" --test=task_cancel
total=0
begun=$SECONDS
for file in "${files[@]}"; do
    # Scenarios that take seeds; those that move megabytes take every hundredth.
    scenarios=$(grep -c 'in seeds(' "tests/$file.rs" || true)
    heavy=$(grep -c 'in heavy_seeds(' "tests/$file.rs" || true)
    runs=$((scenarios * seeds + heavy * seeds / 100))
    start=$SECONDS
    cargo test --quiet --target-dir "$target" --test "$file"
    took=$((SECONDS - start))
    echo "$file: $scenarios scenarios x $seeds seeds, $heavy x $((seeds / 100)): $took s"
    total=$((total + runs))
done
start=$SECONDS
cargo test --quiet --target-dir "$target" --test task_cancel
echo "task_cancel: $real seeds on the real kernel: $((SECONDS - start)) s"
took=$((SECONDS - begun))
echo "soak: $total runs (seeds $range) in $took s, $((total / (took > 0 ? took : 1))) runs/s"
