#!/usr/bin/env bash
# Builds the agent's image without Docker and without a registry: two layers that scripts/image-root.sh fills, packed
# as an OCI archive. Layers are kept outside of the checkout, in ${XDG_CACHE_HOME:-~/.cache}/hibernode, by what they
# are made of; build/hibernode-image.tar points to the archive. HIBERNODE_IMAGE_FRESH=1 takes Debian's packages anew,
# which the name of the base layer does not tell.
set -euo pipefail
export LC_ALL=C.UTF-8
umask 022
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

readonly link=${HIBERNODE_IMAGE_LINK:-build/hibernode-image.tar} # image-twice.sh has others

# The name under which a kubelet finds the image that the manifests name without a registry.
name=docker.io/library/hibernode:$(sed -n 's/^__version__ = "\(.*\)"/\1/p' agent/hibernode/__init__.py)

digest() { sha256sum | cut -c 1-16; }

base_key() {
  {
    dpkg --print-architecture
    cat daemonset/image-packages requirements.lock pyproject.toml agent/hibernode/data/placeholder.c \
      scripts/{lib,install-criu,build-placeholder,image-root}.sh scripts/oci.py
  } | digest
}

# app_key: the files as the package has them, links followed.
app_key() {
  {
    printf '%s\n' "$base" "$name"
    cat daemonset/Dockerfile scripts/image.sh
    find -L agent/hibernode -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum
  } | digest
}

make_base() {
  mkdir "$work/root" && scripts/image-root.sh base "$work/root" >&3 &&
    .venv/bin/python scripts/oci.py layer "$work/root" "$work/layer" &&
    rm -rf "$base" && mkdir "$work/new" && mv "$work/root" "$work/layer" "$work/layer.json" "$work/new/" &&
    mv -T "$work/new" "$base"
}

make_image() {
  mkdir "$work/app" && scripts/image-root.sh app "$work/app" "$base/root" >&3 &&
    .venv/bin/python scripts/oci.py layer "$work/app" "$work/layer" &&
    .venv/bin/python scripts/oci.py image "$name" daemonset/Dockerfile "$work/image" "$base/layer" "$work/layer" &&
    mv -T "$work/image" "$image"
}

# use: point to what is there; what no checkout has used for a month goes.
use() {
  [ -f "$image" ] && [ -z "$fresh" ] || return 1
  touch -c "$image" "$base"
  find "$cache" -maxdepth 1 -name 'image-*' -mtime +30 -exec rm -rf {} +
  mkdir -p "$(dirname "$link")"
  ln -sfn "$image" "$link.$$" && mv -fT "$link.$$" "$link"
}

cache=$(realpath -m -- "${XDG_CACHE_HOME:-$HOME/.cache}/hibernode")
base=$cache/image-base-$(base_key)
image=$cache/image-$(app_key).tar
fresh=${HIBERNODE_IMAGE_FRESH:-}
readonly cache base image
mkdir -p "$cache"
if use; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  printf 'image: needs root, for files that belong to root, and the apt of a Debian\n' >&2
  printf '  elsewhere: docker build -f daemonset/Dockerfile .\n' >&2
  exit 1
fi
# One build at a time on this machine; the lock is on a folder of its own.
mkdir -p "$cache/image.lock"
exec 9<"$cache/image.lock"
flock -n 9 || { printf 'image: another build runs on this machine, waiting for it\n' && flock 9; }
if use; then exit 0; fi
rm -rf "$cache"/.image-* # of a build that was killed
work=$(mktemp -d "$cache/.image-XXXXXX") # on the cache's file system: a rename publishes
trap 'rm -rf -- "$work"' EXIT
trap 'exit 130' INT TERM HUP
log=$work/log
readonly work log
exec 3>&1
began=$SECONDS
if [ -n "$fresh" ] || [ ! -d "$base" ]; then
  printf 'image: base layer, about half a minute; then it is kept\n'
  make_base
fi
make_image
fresh=
use
size() { du -shL --apparent-size "$1" | cut -f 1; }
printf 'image: %s in %d s; archive %s, unpacked %s: %s\n' "$name" $((SECONDS - began)) "$(size "$link")" \
  "$(du -sh "$base/root" | cut -f 1)" "$link"
