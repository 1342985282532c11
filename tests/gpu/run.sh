#!/usr/bin/env bash
# Is graphshard right on this GPU, and how fast? One command, nine minutes, no network; docs/gpu.md says more.
#
#     tests/gpu/run.sh                                      all of it, on the first GPU
#     tests/gpu/run.sh --wheels DIR                         with packages that are missing here, from wheels in a folder
#     tests/gpu/run.sh --artifact FILE                      with a file that --export made on another machine
#     tests/gpu/run.sh --export FILE --capability 9.0       makes that file, where no GPU is
#     tests/gpu/run.sh --dry                                all of it in small, on a CPU
#     tests/gpu/run.sh --help                               the other options
#
# graphshard need not be installed. PYTHON chooses another Python than python3.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
