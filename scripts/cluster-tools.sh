#!/usr/bin/env bash
# Sees to the programs of a Kubernetes control plane and node for `make test-cluster` and `make demo-cluster`: etcd
# and kubectl from Debian's packages; kube-apiserver, kube-controller-manager, kube-scheduler and kubelet built from
# the last source package of Debian that has them all. They are kept outside of the checkout, in
# ${XDG_CACHE_HOME:-~/.cache}/hibernode, and .venv/libexec/cluster points to them. Run it as often as you like.
# The archive's address comes from this machine's apt configuration.
set -euo pipefail
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
umask 022
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

readonly VERSION=1.20.5+really1.20.2
readonly SOURCE=$VERSION-1.1+deb12u1
readonly COMPONENTS=(kube-apiserver kube-controller-manager kube-scheduler kubelet)
readonly DEBS=(
  golang-1.19-go/bookworm golang-1.19-src/bookworm golang-github-modern-go-reflect2-dev/bookworm
  etcd-server/bookworm
  kubectl/trixie # bookworm's is older than `components` in a kustomization
)
readonly FREE_KIB=$((4 * 1024 * 1024)) # the tree with Go's cache: 2.3 GiB at its largest
readonly link=.venv/libexec/cluster

# Each of these fills $work; "|| return": step turns errexit off.

fetch() {
  local deb
  private_apt "$work/apt" deb bookworm deb trixie deb-src bookworm || return
  mkdir "$work/debs" && cd "$work/debs" || return
  export APT_CONFIG=$work/apt/apt.conf
  apt-get -q download "${DEBS[@]}" || return
  for deb in *.deb; do dpkg-deb --extract "$deb" "$work/root" || return; done
  # apt checks the files against the signed index; dpkg-source would need the maintainer's key.
  apt-get -q source --download-only "kubernetes=$SOURCE" || return
  dpkg-source --no-check -x kubernetes_*.dsc "$tree"
}

# go_env: Go and the tree as the tree's own scripts want them.
go_env() {
  export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$tree/.go GOPROXY=off GOSUMDB=off CGO_ENABLED=0 HOME=$work/home
  # Without the clouds' libraries and dockershim: half the program, and half the time.
  export GOFLAGS=-tags=providerless,dockerless PATH=$GOROOT/bin:$PATH KUBE_GIT_VERSION_FILE=$work/version
  cd "$tree"
}

prepare() {
  local reflect2=$tree/vendor/github.com/modern-go/reflect2
  # The vendored 1.0.1 crashes under Go >= 1.18 at the first custom resource.
  rm -f "$reflect2"/*.go "$reflect2"/*.s || return
  cp "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2"/*.{go,s} "$reflect2/" || return
  mkdir -p "$tree/.go/src/k8s.io" "$work/home" && ln -sfn ../../.. "$tree/.go/src/k8s.io/kubernetes" || return
  printf '%s\n' KUBE_GIT_COMMIT=unknown KUBE_GIT_TREE_STATE=archive KUBE_GIT_VERSION="v${VERSION#*really}" \
    KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20 >"$work/version"
}

# generate: the one file that is not in the package.
generate() { go_env && nice -n 10 make gen_openapi; }

build() { go_env && nice -n 10 hack/make-rules/build.sh "${COMPONENTS[@]/#/cmd/}"; }

collect() {
  local program
  mkdir "$work/new" || return
  cp "${COMPONENTS[@]/#/$tree/_output/local/go/bin/}" "$work"/root/usr/bin/{etcd,kubectl} "$work/new/" || return
  cd "$work/new" || return
  for program in etcd "${COMPONENTS[@]}"; do "./$program" --version || return; done
  ./kubectl version --client
}

# key: changes with whatever decides the result; bash prints a function without its comments.
key() {
  {
    declare -p VERSION SOURCE COMPONENTS DEBS
    declare -f fetch go_env prepare generate build collect
    dpkg --print-architecture
  } | sha256sum | cut -c 1-16
}

# missing_packages: what the build needs and this machine lacks.
missing_packages() {
  command -v make >/dev/null || echo make
  command -v patch >/dev/null || echo patch
  command -v rsync >/dev/null || echo rsync
  command -v dpkg-source >/dev/null || echo dpkg-dev
}

# use: point to what is there; what no checkout has used for a month goes.
use() {
  [ -d "$kept" ] || return 1
  touch -c "$kept"
  find "$cache" -maxdepth 1 -name 'cluster-*' -mtime +30 -exec rm -rf {} +
  mkdir -p "$(dirname "$link")"
  # Two at once: a rename replaces the link, whoever comes second.
  ln -sfn "$kept" "$link.$$" && mv -fT "$link.$$" "$link"
}

if ! command -v apt-get >/dev/null; then
  printf 'cluster-tools: the control plane is built from a Debian source package, and there is no apt here\n' >&2
  exit 1
fi
cache=$(realpath -m -- "${XDG_CACHE_HOME:-$HOME/.cache}/hibernode")
kept=$cache/cluster-$(key)
readonly cache kept
mkdir -p "$cache"
if use; then exit 0; fi
# One build at a time on this machine; the lock is on the folder, so that nothing is left behind.
exec 9<"$cache"
flock -n 9 || { printf 'cluster-tools: another build runs on this machine, waiting for it\n' && flock 9; }
if use; then exit 0; fi
rm -rf "$cache"/.cluster-* # of a build that was killed

free=$(df --output=avail -k "$cache" | tail -n 1)
if [ "$free" -lt "$FREE_KIB" ]; then
  printf 'cluster-tools: %s has %d MiB free, the build needs %d MiB\n' \
    "$cache" $((free / 1024)) $((FREE_KIB / 1024)) >&2
  printf '  make room, or name another place: XDG_CACHE_HOME=/large/disk make cluster-tools\n' >&2
  exit 1
fi
work=$(mktemp -d "$cache/.cluster-XXXXXX") # on the cache's file system: a rename publishes
tree=$work/tree log=$work/log
readonly work tree log
trap 'rm -rf -- "$work"' EXIT
trap 'exit 130' INT TERM HUP
began=$SECONDS

printf 'cluster-tools: first build on this machine, about 5 minutes on 2 idle cores; then it is kept\n'
read -r -d '' -a packages < <(missing_packages) || true
if [ ${#packages[@]} -gt 0 ]; then
  if [ "$(id -u)" != 0 ]; then
    printf 'cluster-tools: missing on this machine: %s\n' "${packages[*]}" >&2
    printf '  install them as root: apt-get install %s\n' "${packages[*]}" >&2
    exit 1
  fi
  step "Debian packages: ${packages[*]}" apt_install "${packages[@]}"
fi
# In subshells: each has a folder and an environment of its own.
in_shell() { ("$@"); }
step "Debian's Go, etcd, kubectl, Kubernetes source" in_shell fetch
step "source made ready" prepare
step "OpenAPI definitions" in_shell generate
step "${#COMPONENTS[@]} programs of Kubernetes (4 minutes)" in_shell build
step "programs collected and started" in_shell collect
mv -T "$work/new" "$kept"
use
printf 'cluster-tools: done in %d s; kept in %s (%s)\n' \
  $((SECONDS - began)) "$kept" "$(du -sh "$kept" | cut -f 1)"
