#!/bin/sh
# NVIDIA's compute-sanitizer over the golden programs and the traps on a card: memcheck finds accesses beyond
# allocations, racecheck finds races in shared memory. Kernels are launched one by one, so that a report names one.
#   scripts/sanitize_gpu.sh [memcheck|racecheck|initcheck|synccheck]...
set -eu
cd "$(dirname "$0")/.."
export PYTHONPATH=".:${PYTHONPATH:-}" GGMLB_CUDA_GRAPHS=0
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on the PATH; it is part of the CUDA toolkit" >&2; exit 2; }
[ $# -gt 0 ] || set -- memcheck racecheck
for tool; do
    echo "== compute-sanitizer --tool $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 --target-processes application-only \
        "${PYTHON:-python3}" -m pytest -q -x -m "gpu and not slow" --timeout 0 -p no:cacheprovider \
        -W default::UserWarning -W default::DeprecationWarning -W default::FutureWarning \
        tests/conformance/test_golden.py tests/gpu/test_card_driver.py \
        -k "not overlap and not slow_stream and not do_not_wait"
done
