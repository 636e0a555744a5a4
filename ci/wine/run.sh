#!/usr/bin/env bash
# Runs one Windows program under Wine, for at most CORELANE_WINE_LIMIT seconds: cargo's runner for the
# Windows target. Called by ci/windows.sh, which sets the environment.
set -euo pipefail
program=$1
shift
status=0
timeout --kill-after=10 "${CORELANE_WINE_LIMIT:-300}" "$CORELANE_WINE" "$program" "$@" || status=$?
if [ "$status" = 124 ] || [ "$status" = 137 ]; then
    echo "ended: $(basename "$program") took longer than ${CORELANE_WINE_LIMIT:-300} s" >&2
fi
exit "$status"
