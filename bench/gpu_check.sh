#!/usr/bin/env bash
# One command for one GPU, offline, under 8 minutes: probe, build, tests, ranks, a llama of several GB, numbers, faults.
#
#   bash bench/gpu_check.sh [--device cuda|host] [--out FOLDER] [--steps probe,build,...] [--no-build] [--limit-s 465]
#
# Results are in FOLDER (default $OUT, else bench/results/<date>-<card>; of the host build/gpu_check/<date>-host):
# results.json and table.md, brought up to date after every step, and log.txt. Exit code 1 if anything failed or was cut
# short. The interpreter is $PYTHON, else the active environment's, else .venv's, else python3.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-}
for place in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$here/../.venv/bin/python"; do
  if [[ -z $python && -x $place ]]; then python=$place; fi
done
exec "${python:-python3}" "$here/gpu/check.py" "$@"
