#!/usr/bin/env bash
# Check correctness and speed on this machine's GPUs, in two calls of ten minutes, without network; see
# docs/evidence/gpu.md.
#
#     tests/gpu/run.sh                                      everything for one GPU, or for several if there are
#     tests/gpu/run.sh                                      again: what was left or failed
#     tests/gpu/run.sh --parts nccl --budget 300            several ranks of NCCL on it, before anything else
#     tests/gpu/run.sh --wheels DIR                         with packages that are missing here, from wheels in a folder
#     tests/gpu/run.sh --artifact FILE                      with a file that --export made on another machine
#     tests/gpu/run.sh --export FILE --capability 9.0       write that file, without a GPU
#     tests/gpu/run.sh --dry                                everything at a small scale on a CPU
#     tests/gpu/run.sh --help                               the other options
#
# graphshard need not be installed. PYTHON selects another interpreter than python3.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -m benchmarks.gpu "$@"
