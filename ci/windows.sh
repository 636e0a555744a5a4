#!/usr/bin/env bash
# The Windows side, built on Linux and run under Wine. Where the packages for that cannot be had it says so
# in a line that begins with "skipped:" and is content.
#
#   ci/windows.sh check    library, tool and tests compile for Windows, without a warning
#   ci/windows.sh          builds them, and runs under Wine what is not about Linux
#
# The toolchain is Debian's (rustc-web), because it comes with its standard library's source: rustup's has no
# Windows target here. Everything is kept in target/windows, and cached there between runs.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-test}
case $mode in check | test) ;; *) echo "usage: ci/windows.sh [check|test]" >&2; exit 2 ;; esac

skip() { echo "skipped: $mode for Windows: $1"; exit 0; }

wine() { command -v wine64 || { [ -x /usr/lib/wine/wine64 ] && echo /usr/lib/wine/wine64; }; }
missing=()
[ -x /usr/bin/rustc ] || missing+=(rustc-web)
[ -e /usr/lib/rustlib/src/rust/library/Cargo.toml ] || missing+=(rust-web-src)
# The standard library makes import libraries even when it is only checked.
command -v x86_64-w64-mingw32-dlltool >/dev/null || missing+=(binutils-mingw-w64-x86-64)
if [ "$mode" = test ]; then
    command -v x86_64-w64-mingw32-gcc >/dev/null || missing+=(gcc-mingw-w64-x86-64)
    wine >/dev/null || missing+=(wine64)
fi
if [ ${#missing[@]} -gt 0 ]; then
    command -v apt-get >/dev/null || skip "no apt-get here to install ${missing[*]} with"
    echo "installing ${missing[*]}"
    log=$(mktemp)
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 \
        || skip "cannot install ${missing[*]}: $(grep '^E:' "$log" | head -1)"
    rm -f "$log"
fi

target=x86_64-pc-windows-gnu
root=$PWD/target/windows
mkdir -p "$root"
export RUSTC=/usr/bin/rustc RUSTDOC=/usr/bin/rustdoc RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$root
export CARGO_PROFILE_DEV_DEBUG=line-tables-only
build=(-Z "build-std=std,panic_unwind" --target "$target")

if [ "$mode" = check ]; then
    # Not -D warnings in RUSTFLAGS, which would be held against the standard library too.
    cargo check -Z warnings --config 'build.warnings="deny"' "${build[@]}" --features cli --all-targets
    exit 0
fi

# Wine 8 has no bcryptprimitives.dll; the directory is on the search path of the programs.
x86_64-w64-mingw32-gcc -shared -O2 -Wall -Werror -o "$root/bcryptprimitives.dll" ci/wine/bcryptprimitives.c -ladvapi32
CORELANE_WINE=$(wine)
export CORELANE_WINE WINEPREFIX=$root/wine WINEDEBUG=-all WINEDLLOVERRIDES="mscoree,mshtml=" WINEPATH="Z:${root//\//\\}"
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER="bash $PWD/ci/wine/run.sh"
wineserver=$(dirname "$(readlink -f "$CORELANE_WINE")")/wineserver64
[ -x "$wineserver" ] || wineserver=$(command -v wineserver || true)
# Ends what is left of this prefix's processes, and no others.
trap '[ -z "$wineserver" ] || "$wineserver" -k >/dev/null 2>&1 || true' EXIT
[ -d "$WINEPREFIX" ] || timeout 120 "$CORELANE_WINE" wineboot --init >/dev/null 2>&1 \
    || { echo "Wine cannot make its prefix in $WINEPREFIX" >&2; exit 1; }
echo "Wine: $("$CORELANE_WINE" --version)"

summary=()
failed=0
run() {
    local name=$1 from=$SECONDS outcome=ok
    shift
    printf '\n-- %s\n' "$name"
    "$@" || { outcome=FAILED; failed=1; }
    summary+=("$(printf '%-28s %-7s %4d s' "$name" "$outcome" $((SECONDS - from)))")
}

# What is compiled for every system. A few seeds are enough here: the simulated kernel is the same one.
# The conformance suite's simulated columns are left to Linux for the same reason.
build+=(--features cli)
names=()
for file in tests/sim_*.rs tests/iocp_*.rs tests/conformance; do
    [ ! -e "$file" ] || names+=("$(basename "$file" .rs)")
done
run "build" cargo test "${build[@]}" --no-run --lib --bin corelane "${names[@]/#/--test=}"
run "build the tool" cargo build "${build[@]}" --bin corelane
run "library" cargo test "${build[@]}" --lib
run "tool's own tests" cargo test "${build[@]}" --bin corelane
for name in "${names[@]}"; do
    case $name in
        sim_*) run "$name" env CORELANE_SIM_SEEDS=0..3 cargo test "${build[@]}" --test "$name" ;;
        conformance) run "$name" cargo test "${build[@]}" --test "$name" -- iocp:: ;;
        *) run "$name" cargo test "${build[@]}" --test "$name" ;;
    esac
done
run "documentation" cargo test "${build[@]}" --doc
run "the tool" timeout --kill-after=10 300 python3 ci/wine/smoke.py "$root/$target/debug/corelane.exe"

printf '\nWindows under Wine:\n'
printf '  %s\n' "${summary[@]}"
exit "$failed"
