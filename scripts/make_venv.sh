#!/usr/bin/env bash
# Make a virtual environment, or keep the one that is there if it is whole and of the same Python.
#
# usage: make_venv.sh FOLDER PYTHON
set -euo pipefail

folder=$1 python=$2
version='import sys; print(sys.version)'

if [ "$("$folder/bin/python" -c "$version" 2>/dev/null)" != "$("$python" -c "$version")" ] || ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    rm -rf "$folder"
    echo "making $folder with $("$python" --version)"
    "$python" -m venv "$folder"
fi
