#!/usr/bin/env bash
# Installs what the tests need besides Rust: a Python for foreign clients and servers, setpriv for
# a process without privileges. Does nothing where they are there already.
set -euo pipefail
missing=()
command -v python3 >/dev/null || missing+=(python3)
command -v setpriv >/dev/null || missing+=(util-linux)
command -v gcc >/dev/null || missing+=(gcc)
if [ ${#missing[@]} -gt 0 ]; then
    echo "installing ${missing[*]}"
    apt-get update -qq
    apt-get install -y -qq "${missing[@]}"
fi
for component in rustfmt clippy; do
    cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1 \
        || { echo "cargo component $component is missing: rustup component add $component" >&2; exit 1; }
done
