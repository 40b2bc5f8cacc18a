#!/usr/bin/env bash
# Print the path of a Python interpreter that can make a virtual environment.
#
# usage: find_python.sh [MINOR...]     minors in order of preference; default: 13 12 11, the newest that noria supports first
#
# Looks at python3.MINOR and python3 on PATH, then at pyenv's versions. An interpreter counts if it runs and has venv, ensurepip and the
# extension modules that noria and pip need. Exits 1 with an explanation if there is none.
set -euo pipefail

if [ $# -gt 0 ]; then minors=("$@"); else minors=(13 12 11); fi

probe='import ctypes, ensurepip, sqlite3, ssl, sys, venv, zlib; print(sys.version_info.minor, sys.executable)'

candidates() {
    local minor
    for minor in "${minors[@]}"; do type -aP "python3.$minor" || true; done
    type -aP python3 || true
    local root=${PYENV_ROOT:-$HOME/.pyenv}
    for minor in "${minors[@]}"; do
        # newest patch release first
        printf '%s\n' "$root"/versions/3."$minor".*/bin/python | sort -rV
    done
}

usable=()
while read -r candidate; do
    [ -x "$candidate" ] || continue
    found=$("$candidate" -c "$probe" 2>/dev/null) || continue
    usable+=("$found")
done < <(candidates)

for minor in "${minors[@]}"; do
    for found in "${usable[@]+"${usable[@]}"}"; do
        if [ "${found%% *}" = "$minor" ]; then
            echo "${found#* }"
            exit 0
        fi
    done
done

echo "noria needs Python $(printf '3.%s ' "${minors[@]}")with the venv and ensurepip modules; none was found on PATH or under pyenv." >&2
echo "On Debian and Ubuntu: apt install python3-venv. Elsewhere: install Python from your package manager or with pyenv." >&2
exit 1
