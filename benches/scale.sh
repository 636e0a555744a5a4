#!/usr/bin/env bash
# Heartbeat connections by the ten thousand, server on core 0 and load on core 1.
#
#   benches/scale.sh [CONNECTIONS [SECONDS]]     50000 and 30 by default
#
# More connections than RLIMIT_NOFILE are held in several rings per process; targets and sources are
# spread over 127.0.0.0/8 because a pair of addresses has some 28,000 ports and is slow beyond 8,000.
set -euo pipefail
cd "$(dirname "$0")/.."
connections=${1:-50000}
seconds=${2:-30}
port=${PORT:-7222}
cargo build --release --features cli
tool=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/release/corelane
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"$tool" serve heartbeat --listen "0.0.0.0:$port" --cpus 0 --max-connections "$connections" \
    --shutdown-timeout 30s >"$scratch/out" 2>"$scratch/err" &
server=$!
for _ in $(seq 100); do
    [ -s "$scratch/out" ] && break
    kill -0 "$server" || { cat "$scratch/err"; exit 1; }
    sleep 0.05
done
status=0
"$tool" load heartbeat --target "127.0.0.1-8:$port" --source 127.0.0.2-9 -c "$connections" \
    --interval 5s --ramp 20k/s -d "${seconds}s" --cpus 1 --server-pid "$server" || status=$?
echo "process descriptors of the server: $(ls /proc/$server/fd | wc -l)"
kill -TERM "$server"
wait "$server" || status=$?
cat "$scratch/err"
exit "$status"
