#!/bin/sh
# Harbor's oracle: the task's simple solver.
set -eu
cp "$(dirname "$0")/baseline.py" "${WORK_DIR:-/work}/solution.py"
