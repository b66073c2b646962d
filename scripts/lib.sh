#!/usr/bin/env bash
# Sourced by the other scripts: steps that say how long they took, and packages of another Debian suite than the
# machine's own. The archive's address comes from this machine's apt configuration.
set -euo pipefail

# step LABEL COMMAND...: runs it quietly and says how long it took; shows what it printed ($log) if it fails.
step() {
  local name=${0##*/} label=$1 start=${EPOCHREALTIME/./} end
  shift
  printf '%s: %-44s' "${name%.sh}" "$label"
  if ! "$@" >"$log" 2>&1 9<&-; then
    printf ' failed\n'
    cat "$log" >&2
    printf '%s: %s failed (above)\n' "${name%.sh}" "$label" >&2
    exit 1
  fi
  end=${EPOCHREALTIME/./}
  printf ' %3d.%d s\n' $(((end - start) / 1000000)) $(((end - start) / 100000 % 10))
}

# apt_install PACKAGE...: a fresh machine has no list of packages yet, an old one a stale list.
apt_install() {
  local install=(apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@")
  "${install[@]}" || { apt-get -q update && "${install[@]}"; }
}

debian_archives() {
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' |
    grep -v '^cdrom:' | awk '!seen[$0]++'
}

# private_apt DIR TYPE SUITE [TYPE SUITE]...: an apt of its own in DIR that sees these suites and no installed
# package, and leaves the machine's own lists alone: APT_CONFIG=DIR/apt.conf apt-get ... TYPE is deb or deb-src.
private_apt() {
  local dir=$1 archive keyring signed=''
  shift
  archive=$(debian_archives | head -n 1) || true
  if [ -z "$archive" ]; then
    # A fresh image has no lists yet, so apt cannot tell which of its sources is Debian's.
    apt-get -q update >&2 || true
    archive=$(debian_archives | head -n 1) || true
  fi
  if [ -z "$archive" ]; then
    printf 'apt knows no Debian archive on this machine\n' >&2
    return 1
  fi
  for keyring in /usr/share/keyrings/debian-archive-keyring.{gpg,pgp}; do
    [ -r "$keyring" ] && signed="signed-by=$keyring" && break
  done
  mkdir -p "$dir"/{lists,archives}/partial
  : >"$dir/status"
  local -A index=([deb]=Packages [deb-src]=Sources)
  while [ $# -gt 0 ]; do
    printf '%s [%s lang=none target=%s] %s %s main\n' "$1" "$signed" "${index[$1]}" "$archive" "$2"
    shift 2
  done >"$dir/sources.list"
  # Check-Valid-Until: sid's index is valid for a week only and a mirror may lag. The signature is checked.
  cat >"$dir/apt.conf" <<EOS
Dir::State "$dir"; Dir::State::lists "$dir/lists"; Dir::State::status "$dir/status";
Dir::Cache "$dir"; Dir::Cache::archives "$dir/archives";
Dir::Etc::sourcelist "$dir/sources.list"; Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null"; Dir::Etc::preferencesparts "/dev/null";
APT::Architectures { "$(dpkg --print-architecture)"; };
APT::Install-Recommends "false"; APT::Sandbox::User "$(id -un)";
Acquire::Check-Valid-Until "false"; Acquire::Retries "3";
EOS
  APT_CONFIG=$dir/apt.conf apt-get -q update >&2
}
