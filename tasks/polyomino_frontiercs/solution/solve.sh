#!/bin/sh
# Harbor's oracle: the baseline program, a greedy that is far from the best known.
set -eu
cp "$(dirname "$0")/baseline.cpp" "${WORK_DIR:-/work}/solution.cpp"
