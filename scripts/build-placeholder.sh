#!/usr/bin/env bash
# build-placeholder.sh FILE
#
# Builds the static program that a restore pod runs (agent/hibernode/data/placeholder.c) into FILE. A FILE that
# is the same already is left alone. The compiler is $CC, or gcc.
set -euo pipefail
umask 022 # hibernode refuses a program that others than root could have changed
source=$(dirname "${BASH_SOURCE[0]}")/../agent/hibernode/data/placeholder.c
mkdir -p "$(dirname "$1")"
new=$(mktemp "$1.XXXXXX")
trap 'rm -f "$new"' EXIT
"${CC:-gcc}" -std=gnu11 -static -s -Os -Wall -Wextra -Werror -o "$new" "$source"
chmod 755 "$new"
cmp -s "$new" "$1" || mv "$new" "$1"
