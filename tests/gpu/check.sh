#!/bin/bash
# What no machine without a GPU can show: the real driver, the real cuda-checkpoint, a real dump and restore.
#
#   tests/gpu/check.sh [HIBERNODE]      as root, on a node with an NVIDIA GPU, driver >= 570, CRIU and cuda-checkpoint
#
# HIBERNODE is the command, by default the one of this checkout. Needs no network and no CUDA toolkit, changes
# nothing outside a directory of its own, and ends in under 5 minutes. The last lines are the report.
#
# Exit codes: 0 all was seen, 1 something failed, 77 nothing could be tried here (no GPU, or what it takes is
# missing).
# shellcheck disable=SC2329,SC2317 # functions are called by name, and by traps
set -uo pipefail

# All of it has 4 minutes, and the step that runs then its own limit.
[ -n "${HIBERNODE_CHECK:-}" ] || HIBERNODE_CHECK=1 exec timeout --foreground 240 "$0" "$@"

readonly NOTHING=77 LIMIT=45
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
readonly here
readonly hibernode=${1:-$here/.venv/bin/hibernode}
readonly python=$here/.venv/bin/python
report=() failed=0 worker=''

nothing() {
    echo "nothing was tried: $*"
    exit "$NOTHING"
}

say() {
    printf '%-46s %-6s %s\n' "$1" "$2" "${3:-}"
    report+=("$(printf '%-46s %-6s %s' "$1" "$2" "${3:-}")")
    [ "$2" != FAILED ] || failed=1
}

# Run a step with a deadline; its output is shown and kept.
step() {
    local name=$1 began=$SECONDS
    shift
    echo "--- $name: $*"
    if timeout "$LIMIT" "$@" >"$base/out" 2>&1 </dev/null; then
        cat "$base/out"
        say "$name" ok "$((SECONDS - began)) s"
    else
        local code=$?
        cat "$base/out"
        say "$name" FAILED "exit code $code after $((SECONDS - began)) s: $(tail -n 1 "$base/out" | cut -c -120)"
        return 1
    fi
}

# Wait until a file has a line with the words.
line() {
    local tries
    for ((tries = 0; tries < 300; tries++)); do
        grep -q -- "$2" "$1" 2>/dev/null && return 0
        sleep 0.1
    done
    echo "no '$2' in $1:"
    cat "$1"
    return 1
}

finish() {
    trap - EXIT
    [ -z "$worker" ] || kill -9 "$worker" 2>/dev/null
    [ -z "$base" ] || rm -rf "$base"
    echo
    echo '=== report'
    echo "driver ${driver:-?}, $(uname -r), $("$hibernode" version 2>/dev/null | head -n 1)"
    printf '%s\n' "${report[@]}"
    if [ "$failed" -ne 0 ]; then
        echo 'FAILED'
        exit 1
    fi
    echo 'all was seen'
    exit 0
}

base=''
[ "$(id -u)" -eq 0 ] || nothing 'this needs root'
[ -e /proc/driver/nvidia/version ] || nothing 'no NVIDIA driver is loaded here'
compgen -G '/dev/nvidia[0-9]*' >/dev/null || nothing 'the driver has no GPU'
driver=$(cat /sys/module/nvidia/version 2>/dev/null || echo 0)
[ "${driver%%.*}" -ge 570 ] || nothing "the driver is $driver, and 570 is the first one that this is for"
[ -x "$hibernode" ] && [ -x "$python" ] || nothing "no $hibernode or no $python: make setup"
tool=$(command -v cuda-checkpoint) || nothing 'no cuda-checkpoint in PATH: github.com/NVIDIA/cuda-checkpoint'

base=$(mktemp -d)
trap finish EXIT
trap 'say "4 minutes" FAILED "the rest was not tried"; exit' TERM
unset HIBERNODE_CHECK
export HIBERNODE_STORE_PATH=$base/store HIBERNODE_STATE_DIR=$base/state HIBERNODE_SIGNALS_PATH=$base/signals
export HIBERNODE_SERVER_SOCKET=$base/agent.sock HIBERNODE_STORE_MIN_FREE_BYTES=0
mkdir -m 1777 "$base/signals"

# A CUDA program by the driver API alone: it fills GPU memory, and on SIGUSR1 reads it back and compares.
cat >"$base/worker.py" <<'WORKER'
import ctypes, os, random, signal, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        sys.exit(f"{name}: CUDA error {code}")
SIZE = 64 << 20
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(SIZE))
data = random.Random(int(sys.argv[1])).randbytes(SIZE)
call("cuMemcpyHtoD_v2", memory, data, ctypes.c_size_t(SIZE))
back = ctypes.create_string_buffer(SIZE)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
def note(text):
    with open(sys.argv[2], "a") as log:  # not held open: a restore wants open files as they were
        log.write(text + "\n")
note(f"ready {os.getpid()}")
times = 0
while True:
    signal.sigwait([signal.SIGUSR1])
    ctypes.memset(back, 0, SIZE)
    call("cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(SIZE))
    times += 1
    note(f"round {times} {'same' if back.raw == data else 'DIFFERENT'}")
WORKER

# Have the worker read its GPU memory back.
compared() {
    kill -USR1 "$worker" && line "$base/worker.log" "^round $1 same\$"
}

state() {
    timeout "$LIMIT" "$tool" --get-state --pid "$worker"
}

is() {
    local found
    found=$(state)
    echo "state: $found"
    [ "$found" = "$1" ]
}

round_trip() {
    local action
    for action in lock checkpoint; do
        timeout "$LIMIT" "$tool" --action "$action" --pid "$worker" || return 1
    done
    is checkpointed || return 1
    for action in restore unlock; do
        timeout "$LIMIT" "$tool" --action "$action" --pid "$worker" || return 1
    done
    is running
}

# Functions are steps too, without timeout around them: their parts have their own.
part() {
    local name=$1 began=$SECONDS
    shift
    echo "--- $name"
    if "$@" >"$base/out" 2>&1; then
        cat "$base/out"
        say "$name" ok "$((SECONDS - began)) s"
    else
        cat "$base/out"
        say "$name" FAILED "$(tail -n 1 "$base/out" | cut -c -120)"
        return 1
    fi
}

step 'NVML: the table' "$hibernode" gpu
step 'NVML: all values' "$hibernode" gpu -o json
step 'doctor' "$hibernode" doctor

setsid "$python" "$base/worker.py" 7 "$base/worker.log" </dev/null >"$base/worker.out" 2>&1 &
worker=$!
disown
if ! part 'a CUDA program of 64 MiB' line "$base/worker.log" ready; then
    tail -n 3 "$base/worker.out"
    exit
fi
part 'its GPU memory is readable' compared 1
step 'NVML: its process is listed' bash -c "'$hibernode' gpu -o json | grep -E '\"pid\": $worker\\b'"
part 'cuda-checkpoint: there and back' round_trip || exit
part 'its GPU memory is the same' compared 2
step 'hibernode checkpoint --dry-run' "$hibernode" checkpoint --pid "$worker" --dry-run
step 'hibernode checkpoint' "$hibernode" checkpoint --pid "$worker" --id c4ec40000001 || exit
part 'it runs on, unlocked' is running
part 'its GPU memory is the same after the dump' compared 3
kill -9 "$worker"
for ((tries = 0; tries < 100; tries++)); do
    [ -e "/proc/$worker" ] || break
    sleep 0.1
done
step 'hibernode restore --dry-run' "$hibernode" restore c4ec40000001 --dry-run
step 'hibernode restore' "$hibernode" restore c4ec40000001 || exit
part 'it runs again, unlocked' is running
# It was dumped after two rounds, so that this is its third one: the file has a line of that name already.
: >"$base/worker.log"
part 'its GPU memory is the same after the restore' compared 3
exit
