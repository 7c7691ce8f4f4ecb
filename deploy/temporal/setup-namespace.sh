#!/bin/sh
# Create the namespace with a retention that outlives a long run, and the search attributes that runs write.
# Address and namespace come as Temporal's own variables. Repeating it does no harm.
set -eu

: "${TEMPORAL_NAMESPACE:=default}"
: "${TTTD_RETENTION:=720h}"
export TEMPORAL_NAMESPACE

attempts=0
until temporal operator cluster health > /dev/null 2>&1; do
  attempts=$((attempts + 1))
  if [ "$attempts" -ge 60 ]; then
    echo "no Temporal server answers at ${TEMPORAL_ADDRESS:-127.0.0.1:7233}" >&2
    exit 1
  fi
  sleep 2
done

if temporal operator namespace describe --namespace "$TEMPORAL_NAMESPACE" > /dev/null 2>&1; then
  temporal operator namespace update --namespace "$TEMPORAL_NAMESPACE" --retention "$TTTD_RETENTION" > /dev/null
else
  temporal operator namespace create --namespace "$TEMPORAL_NAMESPACE" --retention "$TTTD_RETENTION" > /dev/null
fi

# A namespace that was just created is not known everywhere at once.
attempts=0
until present=$(temporal operator search-attribute list 2> /dev/null); do
  attempts=$((attempts + 1))
  if [ "$attempts" -ge 30 ]; then
    echo "namespace $TEMPORAL_NAMESPACE does not answer" >&2
    exit 1
  fi
  sleep 2
done

for attribute in TttdTask:Keyword TttdState:Keyword TttdModel:Keyword TttdStep:Int TttdBest:Double TttdVersion:Int; do
  name=${attribute%%:*}
  if ! printf '%s\n' "$present" | grep -qw "$name"; then
    temporal operator search-attribute create --name "$name" --type "${attribute##*:}" > /dev/null
  fi
done
echo "namespace $TEMPORAL_NAMESPACE is ready, retention $TTTD_RETENTION"
