#!/bin/sh
# What Harbor's verifier runs: judges the agent's program in the sandbox, and writes /logs/verifier/reward.json. No network.
# Where the judge itself fails nothing is written, which Harbor reports as the verifier's error, never as a reward of 0.
set -eu
TESTS=${TESTS_DIR:-/tests}
export PYTHONPATH="$TESTS/tttd"
exec "${PYTHON:-python3}" -P -m activities.judge.harbor \
  --task "$TESTS"/task/* --program "${PROGRAM:-/work/solution.py}" --logs "${LOGS_DIR:-/logs/verifier}"
