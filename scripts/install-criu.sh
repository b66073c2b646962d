#!/usr/bin/env bash
# install-criu.sh [PREFIX]   (default /opt/hibernode/criu)
#
# Sees to a CRIU that is new enough and prints its path, nothing else, on standard output.
#  1. A good one that is here already (PREFIX/bin/criu, PATH) is used; nothing is written.
#  2. The machine's own suite, if it has one.
#  3. Debian sid's packages, unpacked into PREFIX and started through their own loader, so that the
#     machine's libraries stay what they are.
#  4. The upstream source that sid's package is made of, built here.
# The archive's address comes from this machine's apt configuration. HIBERNODE_CRIU_BUILD=1 goes straight to 4.
# With DESTDIR only 3 is done, into DESTDIR/PREFIX, for a root file system in which PREFIX is then right.
#
# Exit codes: 0 ok, 1 no CRIU, 2 usage.
set -euo pipefail
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
umask 022 # hibernode refuses a CRIU that others than root could have changed
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# 4.1.1 fails on every TCP and UDP socket on kernel 6.18: SO_PASSCRED on inet sockets is refused there.
readonly MINIMUM=4.2
readonly MARK=.installed-by-hibernode
readonly BUILD_DEPENDENCIES=(
  make gcc libc6-dev pkg-config protobuf-compiler protobuf-c-compiler python3-protobuf xz-utils binutils
  libprotobuf-dev libprotobuf-c-dev libnl-3-dev libcap-dev libbsd-dev libnet1-dev libgnutls28-dev
  libnftables-dev uuid-dev
)

say() { printf 'install-criu: %s\n' "$*" >&2; }
die() {
  say "$1"
  [ $# -lt 2 ] || printf '  %s\n' "$2" >&2
  exit 1
}

# new_enough PROGRAM...: does this command line run, and is it a CRIU that we can use?
new_enough() {
  local version
  version=$("$@" --version 2>/dev/null | sed -n 's/^Version: //p') || return 1
  [[ $version =~ ^[0-9] ]] && [ "$(printf '%s\n' "$MINIMUM" "$version" | sort -V | head -n 1)" = "$MINIMUM" ]
}

# shell_word TEXT: TEXT as one word of a shell command; plain words stay as they are.
shell_word() {
  if [[ $1 =~ ^[A-Za-z0-9_./:+-]+$ ]]; then printf '%s' "$1"; else printf "'%s'" "${1//\'/\'\\\'\'}"; fi
}

# first_of PATH...: the first that exists.
first_of() {
  local path
  for path; do [ -e "$path" ] && printf '%s' "$path" && return; done
  return 1
}

# Each route fills $new, the tree that becomes PREFIX, with a bin/criu that is right once it stands there.

from_sid() {
  local triplet loader libraries program deb
  private_apt "$work" deb sid || return 1
  APT_CONFIG=$work/apt.conf apt-get -q -y --download-only install criu >&2 || return 1
  for deb in "$work"/archives/*.deb; do dpkg-deb --extract "$deb" "$new" || return 1; done
  rm -rf "$new"/usr/share/{doc,man,locale,i18n,info,lintian,bug,zoneinfo} "$new"/usr/lib/*/gconv \
    "$new/etc" "$new/var"
  triplet=$(basename "$(dirname "$(first_of "$new"/{usr/,}lib/*-linux-gnu*/libc.so.6)")") || return 1
  # Some packages put their files below /lib, others below /usr/lib.
  loader=$(first_of "$new"/{usr/,}lib64/ld-linux-*.so.[0-9] "$new"/{usr/,}lib/ld-linux-*.so.[0-9]) || return 1
  program=$(first_of "$new"/usr/{s,}bin/criu) || return 1
  libraries=/usr/lib/$triplet:/lib/$triplet
  new_enough "$loader" --library-path "$new${libraries/:/:$new}" "$program" || return 1
  mkdir -p "$new/bin"
  # hibernode reads this line and starts the loader itself; keep its shape.
  {
    printf '#!/bin/sh\nexec %s' "$(shell_word "$prefix${loader#"$new"}")"
    printf ' --library-path %s' "$(shell_word "$prefix${libraries/:/:$prefix}")"
    printf ' %s "$@"\n' "$(shell_word "$prefix${program#"$new"}")"
  } >"$new/bin/criu"
  chmod 755 "$new/bin/criu"
}

from_source() {
  local tarball
  private_apt "$work" deb-src sid || return 1
  # The source package's own files may be missing from a mirror; upstream's tarball is all that is needed.
  # apt checks it against the signed index.
  (cd "$work" && APT_CONFIG=$work/apt.conf apt-get -q source --download-only criu >&2) || true
  tarball=$(first_of "$work"/criu_*.orig.tar.*) || return 1
  apt_install "${BUILD_DEPENDENCIES[@]}" >&2 || return 1
  mkdir -p "$work/source" "$new/bin"
  tar -xf "$tarball" -C "$work/source" --strip-components=1 || return 1
  say "building $(basename "$tarball"), about a minute"
  make -C "$work/source" -j"$(nproc)" WERROR=0 criu >"$work/build.log" 2>&1 ||
    { tail -n 30 "$work/build.log" >&2; return 1; }
  install -s -m 755 "$work/source/criu/criu" "$new/bin/criu" || return 1
  new_enough "$new/bin/criu"
}

# publish: $new becomes PREFIX, which is never half a tree.
publish() {
  touch "$new/$MARK"
  chmod 755 "$new"
  if [ -e "$target" ]; then
    mv -T "$target" "$work/replaced"
    mv -T "$new" "$target" || { mv -T "$work/replaced" "$target"; die "cannot write $target"; }
  else
    mv -T "$new" "$target"
  fi
}

# use_present: is there a good one already?
use_present() {
  local present
  [ -z "$build" ] && [ -z "${DESTDIR:-}" ] || return 0
  for present in "$prefix/bin/criu" "$(command -v criu || true)"; do
    if [ -n "$present" ] && [ -x "$present" ] && new_enough "$present"; then
      printf '%s\n' "$present"
      exit 0
    fi
  done
}

# finish PROGRAM: does the kernel do what CRIU needs? Then print the path.
finish() {
  local answer
  if [ "$(id -u)" != 0 ]; then
    say "not root, so 'criu check' was not run"
  elif ! answer=$("$1" check 2>&1); then
    printf '%s\n' "$answer" >&2
    die "$1 runs, but this machine lacks what it needs (above)" \
      "run as root outside of a restricted container, on a kernel with CONFIG_CHECKPOINT_RESTORE"
  fi
  printf '%s\n' "$1"
  exit 0
}

[ $# -le 1 ] || { say "usage: install-criu.sh [PREFIX]"; exit 2; }
prefix=$(realpath -m -- "${1:-/opt/hibernode/criu}")
target=${DESTDIR:-}$prefix
readonly prefix target
case $prefix in
  *[:\;$'\n']*) say "$prefix: the loader cannot take ':', ';' or a line break in a library path"; exit 2 ;;
esac

build=${HIBERNODE_CRIU_BUILD:-}
use_present
command -v apt-get >/dev/null || die "no CRIU >= $MINIMUM here, and no apt to get it with" \
  "install CRIU >= $MINIMUM so that 'criu' is on PATH"
if [ -e "$target" ] && [ ! -e "$target/$MARK" ] && [ -n "$(ls -A -- "$target")" ]; then
  die "$target is not empty and was not made by this script" "give another PREFIX, or remove it"
fi

parent=$(dirname -- "$target")
mkdir -p -- "$parent"
# One at a time for a prefix; the lock is on the folder itself, so nothing is left behind.
exec 9<"$parent"
flock 9
use_present # somebody else may have made it while we waited
work=$(mktemp -d "$parent/.criu-XXXXXX") # on the prefix's file system: a rename publishes
trap 'rm -rf -- "$work"' EXIT
trap 'exit 130' INT TERM HUP
new=$work/new
mkdir "$new"

if [ -n "${DESTDIR:-}" ]; then
  from_sid 9<&- || die "sid's packages did not give a CRIU that runs"
  publish
  printf '%s\n' "$prefix/bin/criu"
  exit 0
fi
if [ -z "$build" ]; then
  candidate=$(apt-cache policy criu | sed -n 's/^  Candidate: //p')
  if [ -n "$candidate" ] && [ "$candidate" != '(none)' ] &&
    dpkg --compare-versions "$candidate" ge "$MINIMUM" && [ "$(id -u)" = 0 ] &&
    apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends criu >&2 9<&- &&
    present=$(command -v criu) && new_enough "$present"; then
    finish "$present"
  fi
  if from_sid 9<&-; then
    publish
    finish "$prefix/bin/criu"
  fi
  say "sid's packages did not give a CRIU that runs; building from source"
  rm -rf -- "$new"
  mkdir "$new"
fi
from_source 9<&- || die "no CRIU >= $MINIMUM could be installed (see above)" \
  "is the network up, and does apt-get update work?"
publish
finish "$prefix/bin/criu"
