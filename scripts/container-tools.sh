#!/usr/bin/env bash
# Installs what the tests with real containers need and this machine lacks: runc, crun, containerd (with ctr), the
# plugins of its pod network, a static busybox, ip, iptables and nft. Debian's own packages, no daemon of theirs is
# used. Run it as often as you like: it asks apt only for what is missing.
set -euo pipefail
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive PATH=$PATH:/usr/sbin:/sbin
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# missing_packages: by what they give, from wherever it is.
missing_packages() {
  command -v runc >/dev/null || echo runc
  command -v crun >/dev/null || echo crun
  { command -v containerd && command -v containerd-shim-runc-v2 && command -v ctr; } >/dev/null || echo containerd
  command -v busybox >/dev/null || echo busybox-static
  { [ -x /usr/lib/cni/bridge ] && [ -x /usr/lib/cni/host-local ]; } || echo containernetworking-plugins
  command -v ip >/dev/null || echo iproute2
  command -v iptables >/dev/null || echo iptables
  command -v nft >/dev/null || echo nftables
}

read -r -d '' -a packages < <(missing_packages) || true
[ ${#packages[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  printf 'container-tools: missing on this machine: %s\n' "${packages[*]}" >&2
  printf '  install them as root, on Debian: apt-get install %s\n' "${packages[*]}" >&2
  exit 1
fi
apt_install "${packages[@]}"
