#!/usr/bin/env bash
# One command for one GPU, offline, under 8 minutes: probe, build, tests, ranks, a llama of several GB, numbers, faults.
#
#   bash bench/gpu_check.sh [--device cuda|host] [--out FOLDER] [--steps probe,build,...] [--no-build] [--limit-s 465]
#
# Results are in FOLDER (default $OUT, else bench/results/<date>-<card>): results.json and table.md, brought up to date
# after every step, and log.txt. Exit code 1 if anything failed or was cut short. PYTHON names the interpreter.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python3}" "$here/gpu/check.py" "$@"
