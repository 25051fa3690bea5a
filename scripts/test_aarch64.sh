#!/usr/bin/env bash
# Runs the operators' tests on aarch64, emulated on an x86-64 machine. Shows that they are right
# there; what they take under emulation says nothing about their speed.
#
# An aarch64 Python runs in QEMU's user mode, and with it setup.py, so the build takes the way that
# it takes on an aarch64 machine; the programs that it starts, ninja and a cross compiler, are this
# machine's own.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

CACHE=${AARCH64_CACHE:-$ROOT/build/aarch64}
case ${1:-} in
  -h | --help)
    cat <<'TEXT'
usage: bash scripts/test_aarch64.sh [PYTEST ARGUMENT...]

Builds bert_unpad for aarch64 and runs the tests of the operators there (or those that the arguments
name) in QEMU, on a CPU with bf16 instructions, and the check of bert_unpad.info on one without.
Takes about half an hour; the first time it also downloads up to 4 GB.

Needs Debian with: apt-get install qemu-user-static g++-aarch64-linux-gnu python3-pip

  AARCH64_CACHE  folder for an aarch64 Debian, PyTorch and the build (default: build/aarch64)
TEXT
    exit
    ;;
esac

QEMU=$(command -v qemu-aarch64-static || command -v qemu-aarch64) ||
  fail "no qemu-aarch64 was found" "Debian: apt-get install qemu-user-static"
CROSS=$(command -v aarch64-linux-gnu-g++) ||
  fail "no aarch64-linux-gnu-g++ was found" "Debian: apt-get install g++-aarch64-linux-gnu"
for tool in apt-get dpkg python3; do
  command -v "$tool" >/dev/null || fail "no $tool was found; this script needs Debian"
done
PY=$(command -v python3)
"$PY" -m pip --version >/dev/null 2>&1 ||
  fail "$PY has no pip" "Debian: apt-get install python3-pip"

mkdir -p "$CACHE"
CACHE=$(cd "$CACHE" && pwd)
DEBIAN=$CACHE/root SITE=$CACHE/site TREE=$CACHE/tree
EMULATED=$DEBIAN/usr/bin/python-emulated # sys.executable, so that tests can start it again

# Python, the C library and what they need, of the Debian release of this machine.
download_debian() {
  local apt=$CACHE/apt package
  rm -rf "$apt" "$DEBIAN"
  mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$DEBIAN/proc"
  touch "$apt/status"
  local -a options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64
    -o APT::Sandbox::User=root -o Dir::State="$apt" -o Dir::State::status="$apt/status"
    -o Dir::Cache="$apt" -o Debug::NoLocking=1)
  apt-get "${options[@]}" update
  apt-get "${options[@]}" install --yes --download-only --no-install-recommends \
    python3 libpython3-dev libstdc++6 libgomp1
  for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$DEBIAN"; done
  rm -r "$apt"
  # PyTorch looks for the processors here; QEMU shows files of this folder instead of the machine's.
  local identity=$DEBIAN/sys/devices/system/cpu/cpu0/regs/identification
  mkdir -p "$identity"
  echo 0x00000000410fd4f0 >"$identity/midr_el1" # Neoverse V2
  printf 'processor : 0\nCPU implementer : 0x41\nCPU architecture: 8\nCPU part : 0xd4f\n\n' \
    >"$DEBIAN/proc/cpuinfo"
  cat >"$EMULATED" <<SH
#!/bin/bash
exec "$QEMU" -cpu "\${AARCH64_CPU:-max}" -L "$DEBIAN" -0 "$EMULATED" "$DEBIAN/usr/bin/python3" "\$@"
SH
  chmod +x "$EMULATED"
}

# PyTorch and what bert_unpad and its tests need, as wheels for aarch64.
download_packages() {
  local glibc version minor
  version=$(basename "$(readlink "$DEBIAN/usr/bin/python3")")
  local -a target=(--only-binary=:all: --python-version "${version#python}"
    --platform manylinux2014_aarch64)
  glibc=$("$EMULATED" -c 'import platform; print(platform.libc_ver()[1])')
  for minor in $(seq 17 "${glibc#2.}"); do
    target+=(--platform "manylinux_2_${minor}_aarch64")
  done
  local -a torch=("torch>=2.11")
  if version=$(newest_cpu_torch "${target[@]}" --timeout 8 --retries 0 --index-url \
    "$TORCH_CPU_INDEX") && [[ -n $version ]]; then
    torch=("torch==$version" --extra-index-url "$TORCH_CPU_INDEX")
  else
    note "PyTorch: with CUDA, as no CPU-only build was found"
    check_disk 12 "PyTorch with CUDA"
  fi
  rm -rf "$SITE"
  "$PY" -m pip install -q --no-compile --target "$SITE" "${target[@]}" "${torch[@]}" \
    -r <(echo "$REQUIREMENTS")
  "$PY" -m pip install -q --target "$CACHE/tools" --upgrade ninja # this machine's
}

step "An aarch64 Debian with Python"
if [[ ! -e $CACHE/debian.done ]]; then
  download_debian
  touch "$CACHE/debian.done"
fi

step "PyTorch for aarch64"
REQUIREMENTS=$(
  "$EMULATED" - "$ROOT/pyproject.toml" <<'PY'
import re, sys, tomllib

project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = project["optional-dependencies"]
# What the operators' tests import; some packages for data have no wheels for aarch64.
names = ("expecttest", "h5py", "pytest", "pytest-xdist", "transformers")
test = [r for r in extras["test"] if re.match(r"[\w-]+", r)[0] in names]
print(*project["dependencies"], *extras["pretrain"], *test, sep="\n")
PY
)
if [[ ! -e $CACHE/packages.done || $(<"$CACHE/packages.done") != "$REQUIREMENTS" ]]; then
  download_packages
  echo "$REQUIREMENTS" >"$CACHE/packages.done"
fi

step "Building (what has changed)"
# In a copy, as the modules of both processors would lie side by side.
mkdir -p "$TREE"
for name in setup.py pyproject.toml README.md bert_unpad build_backend csrc gpu_model tests; do
  rm -rf "${TREE:?}/$name"
  cp -a "$ROOT/$name" "$TREE"
done
rm -f "$TREE"/bert_unpad/*.so
cd "$TREE"
export PATH=$CACHE/tools/bin:$PATH PYTHONPATH=$TREE:$SITE OMP_NUM_THREADS=1
CXX="$CROSS -idirafter $DEBIAN/usr/include" BERT_UNPAD_CUDA=0 \
  "$EMULATED" setup.py -q build_ext --inplace

step "Operators on a CPU without bf16 instructions (Neoverse N1)"
AARCH64_CPU=neoverse-n1 "$EMULATED" -m bert_unpad.info | grep -A1 '^instruction set'
AARCH64_CPU=neoverse-n1 "$EMULATED" -m bert_unpad.info --check

step "Tests on a CPU with bf16 instructions"
if [[ $# -eq 0 ]]; then
  set -- tests/ops tests/test_build.py
fi
# QEMU does not enforce the limit on memory that the deselected test sets.
"$EMULATED" -m pytest -m "not gpu_model" "$@" --deselect \
  tests/ops/test_safety.py::test_a_failed_allocation_of_scratch_memory_keeps_its_message
