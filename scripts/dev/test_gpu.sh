#!/usr/bin/env bash
# Runs the CUDA tests and benchmarks on a machine with a GPU, in one command, without a network:
#
#     scripts/dev/test_gpu.sh --collect-wheels wheels --python 3.12     # before, where there is a network
#     scripts/dev/test_gpu.sh --wheels wheels                           # on the machine with the GPU
#
# PYTHON is the Python that is used, with PyTorch and CuPy; python3 if it is not set. --help lists all options.
exec "${PYTHON:-python3}" "$(dirname "$0")/test_gpu.py" "$@"
