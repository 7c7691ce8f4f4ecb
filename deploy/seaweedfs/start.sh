#!/bin/sh
# Fill in the identities' keys from the environment, and serve. The file with the keys lies in memory only.
set -eu

sed_script=""
for role in CONSOLE CONTROL SAMPLE JUDGE TRAIN ENGINE; do
  for part in KEY SECRET; do
    eval "value=\${TTTD_${role}_${part}:?is not set}"
    case $value in
      *[!A-Za-z0-9._-]*)
        echo "TTTD_${role}_${part} may hold letters, digits, '.', '_' and '-' only" >&2
        exit 1
        ;;
    esac
    sed_script="$sed_script;s/@${role}_${part}@/$value/"
  done
done

umask 022
sed "${sed_script#;}" "${TTTD_IDENTITIES:-/etc/tttd/identities.json.in}" > "${TTTD_S3_CONFIG:-/run/tttd/identities.json}"
exec "$@" -s3.config="${TTTD_S3_CONFIG:-/run/tttd/identities.json}"
