#!/usr/bin/env bash
# Heartbeat connections by the ten thousand, server on core 0 and load on core 1.
#
#   benches/scale.sh [CONNECTIONS [SECONDS [INTERVAL]]]     50000, 30 and 5s by default
#   WAIT=coalesce=5ms benches/scale.sh 50000                how both sides wait (--wait)
#
# More connections than RLIMIT_NOFILE are held in several rings per process; targets and sources are
# spread over 127.0.0.0/8 because a pair of addresses has some 28,000 ports and is slow beyond 8,000.
# A connection takes some 10 KB of the kernel's memory for both ends: more than fit with 2 GiB left are refused.
set -euo pipefail
cd "$(dirname "$0")/.."
connections=${1:-50000}
seconds=${2:-30}
interval=${3:-5s}
wait=${WAIT:-block}
port=${PORT:-7222}
# Kernel and both processes, in KiB: 9.7 of the kernel for both ends, 0.4 of the two processes.
needed=$((connections * 11 + 300000))
available=$(awk '/^MemAvailable:/ { print $2 }' /proc/meminfo)
if [ $((needed + (2 << 20))) -gt "$available" ]; then
    echo "$connections connections need about $((needed >> 10)) MiB (11 KiB each for both ends, 300 MiB for rings and buffers); of" \
        "$((available >> 10)) MiB available 2048 are left alone: at most $(((available - (2 << 20) - 300000) / 11)) fit" >&2
    exit 4
fi
side=8
while [ $((side * side * 8000)) -lt "$connections" ]; do side=$((side + 4)); done
cargo build --release --features cli
tool=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/release/corelane
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$tool" serve heartbeat --listen "0.0.0.0:$port" --cpus 0 --max-connections "$connections" \
    --wait "$wait" --idle-timeout 0 --shutdown-timeout 60s >"$scratch/out" 2>"$scratch/err" &
server=$!
for _ in $(seq 400); do
    [ -s "$scratch/out" ] && break
    kill -0 "$server" || { cat "$scratch/err"; exit 1; }
    sleep 0.05
done
status=0
"$tool" load heartbeat --target "127.0.0.1-$side:$port" --source "127.0.1.1-$side" -c "$connections" \
    --interval "$interval" --ramp 20k/s -d "${seconds}s" --wait "$wait" --cpus 1 --server-pid "$server" --connect-timeout 60s || status=$?
grep -E '^(MemAvailable|Slab)' /proc/meminfo
echo "process descriptors of the server: $(ls /proc/$server/fd | wc -l)"
kill -TERM "$server"
wait "$server" || status=$?
cat "$scratch/err"
exit "$status"
