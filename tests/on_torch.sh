#!/usr/bin/env bash
# Run the tests with another release of torch, in a temporary environment:
#
#     tests/on_torch.sh 2.15.0                                  the quick tests
#     tests/on_torch.sh 2.15.0 -m '' tests/distributed          other arguments of pytest
#     PYTHON=python3.13 tests/on_torch.sh 2.15.0                another Python
#     ENVIRONMENT=~/torch-2.15 tests/on_torch.sh 2.15.0         an environment to keep and reuse
#
# The registry's releases bring several gigabytes of CUDA libraries. For those without:
# PIP_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_EXTRA_INDEX_URL=https://pypi.org/simple
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?which release of torch? For example: tests/on_torch.sh 2.15.0}
shift

if [ -z "${ENVIRONMENT:-}" ]; then
    ENVIRONMENT=$(mktemp -d)
    trap 'rm -rf "$ENVIRONMENT"' EXIT
fi
[ -x "$ENVIRONMENT/bin/python" ] || "${PYTHON:-python3}" -m venv "$ENVIRONMENT"
. "$ENVIRONMENT/bin/activate"

# Ignore pyproject.toml's version limits for torch, so that newer releases can be tested.
wanted=$(mktemp)
python3 - > "$wanted" <<'PY'
import json
import re
import subprocess
import sys

report = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--report", "-", "."]
(package,) = json.loads(subprocess.run(report, check=True, capture_output=True, text=True).stdout)["install"]
for line in package["metadata"]["requires_dist"]:
    requirement, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", requirement)[0]
    # The extra `test` names `cross` as a part of this package, which is installed below.
    if name not in ("torch", "graphshard") and ("extra" not in marker or re.search(r'extra == "(test|cross)"', marker)):
        print(requirement)
PY
pip install -q "torch==$version" -r "$wanted"
rm "$wanted"
pip install -q --no-deps -e .
python -c 'import platform, torch; print(f"torch {torch.__version__}, Python {platform.python_version()}")'
pytest "$@"
