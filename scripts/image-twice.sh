#!/usr/bin/env bash
# Builds the agent's image twice from nothing, each time in a cache and a time zone of its own, and says which files
# differ. Takes a minute on two idle cores, 2 GiB of disk meanwhile, and Debian's packages twice over the network; what
# `make image` has made stays as it is. The two are of one day: Debian's packages move on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
readonly work
trap 'rm -rf -- "$work"' EXIT
trap 'exit 130' INT TERM HUP

build() { # NAME ZONE
  XDG_CACHE_HOME=$work/$1 HIBERNODE_IMAGE_LINK=$work/$1.tar TZ=$2 scripts/image.sh
}

# unpack ARCHIVE FOLDER: the files of all its layers.
unpack() {
  local layer
  mkdir "$2" "$2.oci" && tar -x -f "$1" -C "$2.oci"
  for layer in "$2.oci"/blobs/sha256/*; do
    ! gzip -t "$layer" 2>/dev/null || tar -xz -f "$layer" -C "$2"
  done
}

build one UTC0
build two XYZ-13
if cmp -s "$work/one.tar" "$work/two.tar"; then
  printf 'image-twice: ok, both have sha256 %s\n' "$(sha256sum "$work/one.tar" | cut -d ' ' -f 1)"
  exit 0
fi
unpack "$work/one.tar" "$work/first"
unpack "$work/two.tar" "$work/second"
printf 'image-twice: the two differ, in owners, modes, times or the settings if no file is named\n' >&2
diff -rq --no-dereference "$work/first" "$work/second" >&2 || true
exit 1
