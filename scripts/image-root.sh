#!/usr/bin/env bash
# image-root.sh base|app DIR
#
# Fills the empty folder DIR with what a layer of the agent's image holds:
#   base  Debian's packages of daemonset/image-packages, CRIU, the placeholder, the Python packages that the
#         agent needs, as requirements.lock pins them, NIXL among them
#   app   the agent itself
# daemonset/Dockerfile and scripts/image.sh both call this, after `make setup`, so there is one way to fill an image.
# Nothing of the machine's own files gets in; nothing is run as installed but Python, to compile.
set -euo pipefail
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
umask 022 # hibernode refuses a CRIU and a placeholder that others than root could have changed
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/lib.sh

readonly SUITE=trixie PYTHON=3.13 # trixie's own
readonly UV=.venv/bin/uv SITE=usr/local/lib/python$PYTHON/dist-packages

# words SED: the lines of the list of packages that are left of this expression.
words() { sed -n -e '/^#/d' -e "$1" daemonset/image-packages; }

unpack_packages() {
  local deb name part
  local -A left_out=()
  for name in $(words 's/^-//p'); do left_out[$name]=1; done
  private_apt "$work/apt" deb "$SUITE" || return
  # shellcheck disable=SC2046 # names without blanks
  APT_CONFIG=$work/apt/apt.conf apt-get -q -y --download-only install $(words '/^[a-z]/p') || return
  # As every Debian has it: some packages still put files below /lib.
  for part in bin sbin lib lib64; do mkdir -p "$root/usr/$part" && ln -s "usr/$part" "$root/$part"; done
  mkdir -p "$root/var/lib/dpkg/status.d"
  for deb in "$work"/apt/archives/*.deb; do
    name=$(dpkg-deb --field "$deb" Package) || return
    [ -z "${left_out[$name]:-}" ] || continue
    dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$root" || return
    # What scanners for known faults look for, in images without dpkg.
    dpkg-deb --field "$deb" >"$root/var/lib/dpkg/status.d/$name" || return
  done
  # Copyright files stay: licences want it.
  find "$root/usr/share/doc" -type l -delete
  find "$root/usr/share/doc" -type f ! -name copyright -delete
  rm -rf "$root"/usr/share/{man,locale,info,lintian,bug,zoneinfo,bash-completion,pixmaps} \
    "$root"/usr/share/{applications,python3/debpython,menu} "$root"/usr/lib/*/gconv \
    "$root"/usr/lib/python$PYTHON/{ensurepip,idlelib,pydoc_data,turtledemo,test,unittest/test} \
    "$root"/etc/{apt,cron*,init.d,default,update-motd.d,logrotate.d} "$root"/var/{backups,cache,local,lock,log,mail,opt,run,spool} \
    "$root"/{boot,home,media,mnt,srv} "$root"/usr/{games,include,src}
  find "$root/usr/share/doc" -type d -empty -delete
}

finish_root() {
  local applet name
  # CRIU holds connections still by iptables-restore; update-alternatives would make these links.
  for name in {iptables,ip6tables}{,-save,-restore}; do ln -sf xtables-nft-multi "$root/usr/sbin/$name"; done
  for applet in $("$root/usr/bin/busybox" --list); do
    [ -e "$root/usr/bin/$applet" ] || [ -e "$root/usr/sbin/$applet" ] || [ "$applet" = busybox ] ||
      ln -s busybox "$root/usr/bin/$applet"
  done
  mkdir -p "$root"/{dev,proc,sys,run,root,tmp,checkpoints,etc/hibernode} "$root"/var/{lib,cache,log,tmp}
  chmod 1777 "$root/tmp" "$root/var/tmp" && chmod 700 "$root/root"
  printf '%s\n' root:x:0:0:root:/root:/bin/sh nobody:x:65534:65534:nobody:/nonexistent:/bin/false >"$root/etc/passwd"
  printf '%s\n' root:x:0: nogroup:x:65534: >"$root/etc/group"
}

install_criu() { DESTDIR=$root scripts/install-criu.sh /opt/hibernode/criu; }

install_placeholder() { install -D -m 755 .venv/libexec/hibernode/placeholder "$root/opt/hibernode/placeholder"; }

# uv_install ARGUMENT...: wheels for the image's Python, whichever this machine's is.
uv_install() {
  "$UV" pip install --quiet --target "$root/$SITE" --python-version "$PYTHON" --link-mode copy "$@" || return
  rm -rf "${root:?}/$SITE"/{bin,include,.lock} "$root/$SITE"/*.scripts
}

install_dependencies() {
  uv_install --only-binary :all: --require-hashes --constraint requirements.lock --requirement pyproject.toml \
    --extra nixl || return
  # nixl_ep wants torch, which is not there (docs/nixl.md).
  rm -rf "$root/$SITE"/nixl_ep_cu12
  find "$root/$SITE" -type d -name tests -prune -exec rm -rf {} +
}

install_agent() {
  rm -rf build/lib build/bdist.* # setuptools would take modules from there that are gone
  uv_install --no-deps --no-build-isolation . || return
  rm -f "$root/$SITE"/hibernode-*.dist-info/{direct_url.json,uv_cache.json,RECORD} # they name this machine's paths
  mkdir -p "$root/usr/local/bin"
  # -I: nothing of the environment or of the folder that it is started in decides what root runs.
  printf '%s\n' '#!/usr/bin/python3 -I' 'from hibernode.cli.main import main' '' 'main()' \
    >"$root/usr/local/bin/hibernode"
  chmod 755 "$root/usr/local/bin/hibernode"
}

# compile FOLDER...: below DIR, once for all starts and whatever times the files have later. By the image's Python.
compile() {
  local loader=("$base"/usr/lib*/ld-linux-*.so.[0-9]) libraries=("$base"/usr/lib/*-linux-gnu*)
  # One process: it starts no other, which would get this machine's libraries.
  PYTHONHOME=$base/usr "${loader[0]}" --library-path "${libraries[0]}" "$base/usr/bin/python$PYTHON" -s \
    -m compileall -q -j 1 --invalidation-mode unchecked-hash -s "$root" -p / "${@/#/$root/}"
}

if [ $# -ne 2 ] && [ $# -ne 3 ]; then
  printf 'usage: image-root.sh base DIR | app DIR BASE\n' >&2
  exit 2
fi
root=$(realpath -- "$2") base=$(realpath -- "${3:-$2}")
work=$(mktemp -d)
log=$work/log
readonly root base work log
trap 'rm -rf -- "$work"' EXIT
trap 'exit 130' INT TERM HUP
if [ "$1" = base ]; then
  step "Debian packages ($SUITE)" unpack_packages
  step "links and folders" finish_root
  step "CRIU" install_criu
  step "placeholder" install_placeholder
  step "Python packages of requirements.lock" install_dependencies
  step "Python compiled" compile "usr/lib/python$PYTHON" "$SITE"
else
  step "hibernode" install_agent
  step "Python compiled" compile "$SITE"
fi
