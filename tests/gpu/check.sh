#!/bin/bash
# What no machine without a GPU can show: the real driver, the real cuda-checkpoint, a real dump and restore.
#
#   tests/gpu/check.sh [HIBERNODE]      as root, on a node with an NVIDIA GPU, driver >= 570, CRIU and cuda-checkpoint
#
# HIBERNODE is the command, by default the one of this checkout. Needs no network and no CUDA toolkit, changes
# nothing outside a directory of its own below TMPDIR (/var/tmp, not on tmpfs), leaves nothing there, and ends in
# under 5 minutes, also where the driver hangs. The last lines are the report: what was seen, what failed, what was
# not tried. Of the settings only HIBERNODE_CRIU_BINARY and HIBERNODE_GPU_CUDA_CHECKPOINT are looked at.
#
# Exit codes: 0 all of it was seen, 1 something failed or was not tried, 77 nothing could be tried here (no GPU, or
# what it takes is missing).
#
# HIBERNODE_CHECK_ROOT, for the test of this script, stands before /proc and /dev; the report says so then.
# shellcheck disable=SC2329,SC2317 # functions are called by name, and by traps
set -uo pipefail

readonly NOTHING=77 ALL=240 GRACE=20 LIMIT=45 ID=c4ec40000001
readonly STEPS=(
    'NVML: the GPUs and the driver' 'NVML: the table' 'doctor'
    'a CUDA program of 64 MiB' 'its GPU memory is readable' 'NVML: its process is listed'
    'cuda-checkpoint: off the GPU and back' 'its GPU memory is the same'
    'hibernode checkpoint --dry-run' 'hibernode checkpoint' 'the manifest has its process and its GPU'
    'it runs on, unlocked' 'its GPU memory is the same after the dump'
    'hibernode restore --dry-run' 'hibernode restore'
    'it runs again, unlocked' 'its GPU memory is the same after the restore'
)
readonly NEVER='never tried by this: several processes (NCCL), several or other GPUs (--device-map), MIG, MPS,
managed memory, containers, CRIU'\''s plugin, GPUs that are lost, XIDs, what takes longer than its deadline'
self=$(realpath "${BASH_SOURCE[0]}")
readonly self root=${HIBERNODE_CHECK_ROOT:-}

# the outer one: looks whether anything can be tried, waits for the steps, clears up, reports ----------------------

nothing() {
    echo "nothing was tried: $*"
    exit "$NOTHING"
}

# End whoever has the directory in its command line: the program, CRIU, the shim, a hibernode that was cut.
clear_up() {
    local entry
    for entry in /proc/[0-9]*; do
        [ "${entry#/proc/}" != $$ ] && [ "${entry#/proc/}" != "$BASHPID" ] || continue
        if cat "$entry/cmdline" 2>/dev/null | tr '\0' '\n' | grep -qF -- "$base/"; then
            kill -9 "${entry#/proc/}" 2>/dev/null
        fi
    done
    rm -rf --one-file-system -- "$base"
}

report() {
    local failed=0 name
    echo
    echo '=== report'
    echo "driver $driver, $(sort "$base/models" | uniq -c | sed 's/^ *\([0-9]*\) /\1 x /' | paste -sd ';')"
    echo "$(uname -srm), $(timeout -k 1 5 "$hibernode" version 2>/dev/null | head -n 1), $tool"
    [ -z "$root" ] || echo "NOT A REAL DRIVER: $root stands before /proc and /dev"
    for name in "${STEPS[@]}"; do
        if grep -m 1 -F -- "$(printf '%-46s ' "$name")" "$base/report"; then
            grep -qF -- "$(printf '%-46s ok ' "$name")" "$base/report" || failed=1
        else
            printf '%-46s %s\n' "$name" 'not tried'
            failed=1
        fi
    done
    echo "$NEVER"
    if [ "$failed" -ne 0 ]; then
        echo "FAILED: not all was seen$([ "$1" -lt 124 ] || echo ", and it was cut after $SECONDS s (code $1)")"
        return 1
    fi
    echo 'all of it was seen'
}

outer() {
    local code=0 child
    [ "$(id -u)" -eq 0 ] || nothing 'this needs root'
    [ -e "$root/proc/driver/nvidia/version" ] || nothing 'no NVIDIA driver is loaded here'
    compgen -G "$root/dev/nvidia[0-9]*" >/dev/null || nothing 'the driver has no GPU'
    driver=$(cat "$root/sys/module/nvidia/version" 2>/dev/null || echo 0)
    [ "${driver%%.*}" -ge 570 ] 2>/dev/null || nothing "the driver is $driver, and 570 is the first one that this is for"
    [ -x "$hibernode" ] || nothing "no $hibernode: make setup, or name the command"
    [ -n "$python" ] || nothing 'no python3'
    [ -x "$tool" ] || nothing 'no cuda-checkpoint in PATH: github.com/NVIDIA/cuda-checkpoint'
    base=$(mktemp -d -p "${TMPDIR:-/var/tmp}" hibernode-check.XXXXXXXX) || nothing 'no directory can be made'
    trap clear_up EXIT
    : >"$base/report" >"$base/models"
    # In the background, so that it is all the same who is sent a signal; with its steps it is one process group.
    timeout -k "$GRACE" "$ALL" "$self" --steps "$base" "$driver" "$hibernode" "$python" "$tool" &
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null' INT TERM HUP
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        code=$?
    done
    report "$code"
}

# the inner one: the steps -----------------------------------------------------------------------------------------

say() {
    printf '%-46s %-6s %s\n' "$1" "$2" "${3:-}" | tee -a "$base/report"
}

# Run a command with a deadline, in this process group so that it ends with us.
limited() {
    timeout --foreground -k 5 "$LIMIT" "$@"
}

# Run a step, a command or a function of ours; its output is shown and kept.
step() {
    local name=$1 began=$SECONDS code=0
    shift
    echo "--- $name: $*"
    "$@" >"$base/out" 2>&1 </dev/null || code=$?
    cat "$base/out"
    if [ "$code" -eq 0 ]; then
        say "$name" ok "$((SECONDS - began)) s"
    else
        say "$name" FAILED "exit code $code after $((SECONDS - began)) s: $(tail -n 1 "$base/out" | cut -c -120)"
    fi
    return "$code"
}

# Wait until a file has a line with the words.
line() {
    local tries
    for ((tries = 0; tries < 400; tries++)); do
        grep -q -- "$2" "$1" 2>/dev/null && return 0
        sleep 0.1
    done
    echo "no '$2' in $1:"
    tail -n 3 "$base/worker.out" "$1"
    return 1
}

program() {
    line "$base/worker.log" '^ready '
}

# Have the worker read its GPU memory back.
compared() {
    kill -USR1 "$worker" && line "$base/worker.log" "^round $1 same\$"
}

is() {
    local found
    found=$(limited "$tool" --get-state --pid "$worker")
    echo "state: $found, wanted: $1"
    [ "$found" = "$1" ]
}

round_trip() {
    local action
    for action in lock checkpoint; do
        limited "$tool" --action "$action" --pid "$worker" || return
    done
    is checkpointed || return
    for action in restore unlock; do
        limited "$tool" --action "$action" --pid "$worker" || return
    done
    is running
}

# Ask for all values, and look by a line of Python whether they are right; so many times, a second apart.
values() {
    local tries
    for ((tries = 1; ; tries++)); do
        limited "$hibernode" gpu -o json >"$base/gpu.json" || return
        "$python" -c "import json, sys; found = json.load(open(sys.argv[1])); $2" "$base/gpu.json" "${@:3}" && return
        [ "$tries" -lt "$1" ] || break
        sleep 1
    done
    cat "$base/gpu.json"
    return 1
}

gone() {
    local tries
    kill -9 "$worker"
    for ((tries = 0; tries < 100; tries++)); do
        [ -e "/proc/$worker" ] || return 0
        sleep 0.1
    done
    echo "pid $worker does not end"
    return 1
}

inner() {
    local name
    base=$1 driver=$2 hibernode=$3 python=$4 tool=$5
    trap 'exit 143' TERM
    for name in $(compgen -e | grep '^HIBERNODE_'); do
        [ "$name" = HIBERNODE_CRIU_BINARY ] || unset "$name"
    done
    # Not by the one that reports: a driver that hangs holds whoever reads this.
    sed -n 's/^Model:[[:space:]]*//p' "$root"/proc/driver/nvidia/gpus/*/information >"$base/models" 2>/dev/null
    : >"$base/settings.yaml" # not the node's: what is tried are the defaults
    mkdir -m 1777 "$base/signals"
    export HIBERNODE_CONFIG=$base/settings.yaml HIBERNODE_GPU_CUDA_CHECKPOINT=$tool
    export HIBERNODE_STORE_PATH=$base/store HIBERNODE_STATE_DIR=$base/state HIBERNODE_SIGNALS_PATH=$base/signals
    # No agent is asked; a socket's path must be short, and TMPDIR need not be.
    export HIBERNODE_SERVER_SOCKET=/run/hibernode-check.none HIBERNODE_STORE_MIN_FREE_BYTES=0

    # A CUDA program by the driver API alone: it fills GPU memory, and on SIGUSR1 reads it back and compares.
    cat >"$base/worker.py" <<'WORKER'
import ctypes, os, random, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
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

    step "${STEPS[0]}" values 1 \
        'sys.exit(not (found["state"] == "up" and found["versions"]["driver"] == sys.argv[2]
        and found["gpus"] and all(gpu["state"] == "ok" for gpu in found["gpus"])))' "$driver"
    step "${STEPS[1]}" limited "$hibernode" gpu
    step "${STEPS[2]}" limited "$hibernode" doctor
    setsid "$python" "$base/worker.py" 7 "$base/worker.log" </dev/null >"$base/worker.out" 2>&1 &
    worker=$!
    step "${STEPS[3]}" program || return
    step "${STEPS[4]}" compared 1 || return
    # The driver may be behind.
    step "${STEPS[5]}" values 5 'sys.exit(not any(
        process["pid"] == int(sys.argv[2]) for gpu in found["gpus"] for process in gpu["processes"] or []))' "$worker"
    step "${STEPS[6]}" round_trip || return
    step "${STEPS[7]}" compared 2 || return
    step "${STEPS[8]}" limited "$hibernode" checkpoint --pid "$worker" --dry-run
    step "${STEPS[9]}" limited "$hibernode" checkpoint --pid "$worker" --id "$ID" || return
    step "${STEPS[10]}" "$python" -c 'import json, sys; cuda = json.load(open(sys.argv[1]))["cuda"]; print(cuda)
sys.exit(not (cuda["strategy"] == "cuda-checkpoint" and len(cuda["processes"]) == len(cuda["gpus"]) == 1))' \
        "$base/store/$ID/manifest.json"
    step "${STEPS[11]}" is running
    step "${STEPS[12]}" compared 3
    gone || return
    step "${STEPS[13]}" limited "$hibernode" restore "$ID" --dry-run
    # It was dumped after two rounds, so that its next one is the third again.
    : >"$base/worker.log"
    step "${STEPS[14]}" limited "$hibernode" restore "$ID" || return
    step "${STEPS[15]}" is running
    step "${STEPS[16]}" compared 3
}

if [ "${1:-}" = --steps ]; then
    shift
    inner "$@"
    exit
fi
here=$(dirname "$(dirname "$(dirname "$self")")")
hibernode=${1:-$here/.venv/bin/hibernode}
python=$here/.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)
tool=${HIBERNODE_GPU_CUDA_CHECKPOINT:-$(command -v cuda-checkpoint)}
outer
