#!/bin/sh
# Create and update Temporal's two databases. Runs at every `up`; what is there already stays as it is.
set -eu

tool() {
  database=$1
  shift
  temporal-sql-tool --plugin postgres12 --ep "$POSTGRES_SEEDS" -p "$DB_PORT" -u "$POSTGRES_USER" --db "$database" "$@"
}

setup() {
  tool "$1" create
  tool "$1" setup-schema -v 0.0
  tool "$1" update-schema -d "/etc/temporal/schema/postgresql/v12/$2/versioned"
}

setup temporal temporal
setup temporal_visibility visibility
