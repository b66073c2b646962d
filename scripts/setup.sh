#!/usr/bin/env bash
# Makes this checkout ready: the few Debian packages that are missing, .venv with what requirements.lock pins,
# and in .venv/libexec CRIU, the placeholder and the stock ModelExpress client of the tests. Run it as often as
# you like: when all is there it only checks a stamp. HIBERNODE_PYTHON names the Python to use (default: the
# first >= 3.11 on PATH).
set -euo pipefail
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive PATH=$PATH:/usr/sbin:/sbin
umask 022
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh
root=$(pwd -P)
readonly root
readonly stamp=.venv/.setup-done
readonly placeholder=.venv/libexec/hibernode/placeholder

# key: changes with whatever decides the result. The folder is part of it: a .venv does not survive a move.
key() {
  printf '%s\n' "$root" | cat - requirements.lock pyproject.toml scripts/setup.sh scripts/lib.sh \
    scripts/install-criu.sh scripts/build-placeholder.sh agent/hibernode/data/placeholder.c \
    scripts/container-tools.sh scripts/modelexpress.lock |
    sha256sum | cut -d ' ' -f 1
}

# done_already: the stamp fits, and what it stands for still runs.
done_already() {
  local done_key criu
  [ -r "$stamp" ] && { read -r done_key && read -r criu; } <"$stamp" &&
    [ "$done_key" = "$(key)" ] && [ -x "$criu" ] && [ -x "$placeholder" ] && .venv/bin/python -c '' 2>/dev/null
}

# usable_python PROGRAM: is it >= 3.11, and can it make a virtual environment with pip in it?
usable_python() {
  "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
  local name
  for name in ${HIBERNODE_PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if command -v "$name" >/dev/null && usable_python "$name"; then
      command -v "$name"
      return
    fi
  done
  return 1
}

# missing_packages: what this machine lacks. What is good enough already, from wherever, is left alone.
missing_packages() {
  find_python >/dev/null || echo python3 python3-venv
  command -v gcc >/dev/null || echo gcc
  [ -e /usr/include/stdio.h ] || echo libc6-dev # the placeholder, and small programs of the tests
  ldconfig -p | grep -q 'libseccomp\.so\.2' || echo libseccomp2
  [ -s /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
  command -v openssl >/dev/null || echo openssl # the certificates of the tests' API server
}

install_packages() {
  apt-get -q update
  apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$@"
}

# venv_is_ours: it runs, and it was made in this folder: the programs in it hold its path.
venv_is_ours() {
  usable_python .venv/bin/python &&
    grep -qsF -e "#!$root/.venv/" -e "\"$root/.venv/" .venv/bin/pip
}

make_venv() {
  rm -rf .venv
  "$1" -m venv .venv
}

install_python_packages() {
  local pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input)
  # Wheels only: a source package would fetch build tools that nothing pins.
  "${pip[@]}" install --require-hashes --no-deps --only-binary :all: -r requirements.lock &&
    "${pip[@]}" install --no-deps --no-build-isolation -e . &&
    nothing_is_missing "${pip[@]}"
}

# nothing_is_missing PIP...: pip check finds no fault but the one that is meant: torch, which nixl only asks for.
nothing_is_missing() {
  local faults
  faults=$("$@" check | grep -v -e '^No broken requirements' -e '^nixl-cu12 .* requires torch, which is not' || true)
  printf '%s' "$faults"
  [ -z "$faults" ]
}

# The stock ModelExpress client for the tests, in a folder of its own: its dependencies stay away.
install_modelexpress() {
  rm -rf .venv/libexec/modelexpress
  .venv/bin/python -m pip --disable-pip-version-check --no-input install --require-hashes --no-deps \
    --only-binary :all: --target .venv/libexec/modelexpress -r scripts/modelexpress.lock
}

install_criu() {
  scripts/install-criu.sh "$root/.venv/libexec/criu" >"$criu_path"
}

if done_already; then exit 0; fi
# One set-up at a time; the lock is on the folder, so that nothing is left behind.
exec 9<.
flock 9
if done_already; then exit 0; fi

log=$(mktemp)
criu_path=$(mktemp)
trap 'rm -f "$log" "$criu_path"' EXIT
began=$SECONDS

read -r -d '' -a packages < <(missing_packages) || true
if [ ${#packages[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    printf 'setup: missing on this machine: %s\n' "${packages[*]}" >&2
    printf '  install them as root, on Debian: apt-get install %s\n' "${packages[*]}" >&2
    exit 1
  fi
  step "Debian packages: ${packages[*]}" install_packages "${packages[@]}"
fi
if ! python=$(find_python); then
  printf 'setup: no Python >= 3.11 with venv and ensurepip on PATH\n' >&2
  printf '  name one: HIBERNODE_PYTHON=/path/to/python3.11 make setup\n' >&2
  exit 1
fi
if ! venv_is_ours; then
  step "virtual environment ($("$python" -V))" make_venv "$python"
fi
step "Python packages of requirements.lock" install_python_packages
step "ModelExpress client" install_modelexpress
step "CRIU" install_criu
step "placeholder" scripts/build-placeholder.sh "$placeholder"
step "container tools" scripts/container-tools.sh
{ key && cat "$criu_path"; } >"$stamp.new"
mv "$stamp.new" "$stamp"
printf 'setup: done in %d s; CRIU is %s\n' $((SECONDS - began)) "$(cat "$criu_path")"
