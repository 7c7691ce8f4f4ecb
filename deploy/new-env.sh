#!/bin/sh
# Write a .env with fresh random keys to standard output: sh deploy/new-env.sh > .env
set -eu
cd "$(dirname "$0")/.."

random() { od -An -N "$1" -tx1 /dev/urandom | tr -d ' \n'; }

# Every line `NAME=change-me` of the example gets a value of its own.
while IFS= read -r line; do
  case $line in
    *_KEY=change-me) printf '%s=tttd-%s\n' "${line%%=*}" "$(random 8)" ;;
    *=change-me) printf '%s=%s\n' "${line%%=*}" "$(random 24)" ;;
    *) printf '%s\n' "$line" ;;
  esac
done < .env.example
