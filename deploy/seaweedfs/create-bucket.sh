#!/bin/sh
# Create the bucket unless it is there.
set -eu

: "${TTTD_BUCKET:=tttd}"
: "${TTTD_MASTER:=store:9333}"

buckets() { echo "s3.bucket.list" | weed shell -master="$TTTD_MASTER" 2> /dev/null | awk '{print $1}'; }

attempts=0
until buckets | grep -qx "$TTTD_BUCKET"; do
  attempts=$((attempts + 1))
  if [ "$attempts" -ge 30 ]; then
    echo "bucket $TTTD_BUCKET could not be created at $TTTD_MASTER" >&2
    exit 1
  fi
  echo "s3.bucket.create -name $TTTD_BUCKET" | weed shell -master="$TTTD_MASTER" > /dev/null 2>&1 || true
  sleep 1
done
echo "bucket $TTTD_BUCKET is ready"
