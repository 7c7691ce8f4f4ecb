#!/bin/sh
# What Harbor's verifier runs: has the FrontierCS judge beside it (host `judge`) score the agent's program, and writes
# /logs/verifier/reward.json. Where that judge does not answer nothing is written, which Harbor reports as the verifier's error,
# never as a reward of 0.
set -eu
TESTS=${TESTS_DIR:-/tests}
export PYTHONPATH="$TESTS/tttd"
exec "${PYTHON:-python3}" -P -m activities.judge.harbor --service "frontiercs=${TTTD_FRONTIERCS_URL:-http://judge:8081}" \
  --task "$TESTS/task/polyomino_frontiercs" --program "${PROGRAM:-/work/solution.cpp}" --logs "${LOGS_DIR:-/logs/verifier}"
