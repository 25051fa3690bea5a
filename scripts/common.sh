# shellcheck shell=bash
# Shared steps of scripts/quickstart.sh, scripts/test.sh and .ci/run; sourced, never run.
#
# `prepare EXTRA...` leaves a current .venv with PyTorch, the compiled modules and an editable
# install. What is already there is reused: .venv/.bert_unpad/ records what was made from what. The
# build runs every time (ninja compiles only what has changed), so that pulled sources take effect.
#
# Environment:
#   BERT_UNPAD_PYTHON  interpreter to make .venv with (default: the first usable python3*)
#   BERT_UNPAD_TORCH   pip requirement for PyTorch, e.g. `torch==2.13.0` (default: see choose_torch)
#   BERT_UNPAD_WHEEL   a wheel of these sources, whose modules are taken instead of compiling them
#   CXX, CUDA_HOME, BERT_UNPAD_CUDA, TORCH_CUDA_ARCH_LIST  as in CONTRIBUTING.md

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
PY=$VENV/bin/python
RECORDS=$VENV/.bert_unpad
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

step() { printf '\n==> %s  [%d s]\n' "$*" "$SECONDS"; }
note() { printf '    %s\n' "$*"; }

# fail MESSAGE [HINT...]
fail() {
  printf '\nerror: %s\n' "$1" >&2
  shift
  [[ $# -eq 0 ]] || printf '       %s\n' "$@" >&2
  exit 1
}

# Prints nvcc's path, looked for where the build does (build_backend/cuda_choice.py); else fails.
find_nvcc() {
  local home
  for home in "${CUDA_HOME:-}" "${CUDA_PATH:-}"; do
    if [[ -n $home && -x $home/bin/nvcc ]]; then
      echo "$home/bin/nvcc"
      return
    fi
  done
  command -v nvcc || command -v /usr/local/cuda/bin/nvcc
}

# For tests: the CUDA operators are built wherever nvcc is, unless BERT_UNPAD_CUDA says 0.
want_cuda() {
  if [[ -z ${BERT_UNPAD_CUDA:-} ]] && find_nvcc >/dev/null; then export BERT_UNPAD_CUDA=1; fi
}

has_gpu() { [[ -e /dev/nvidia0 ]] || nvidia-smi -L >/dev/null 2>&1; }

# Prints why interpreter $1 cannot be used; nothing if it can.
python_problem() {
  "$1" - 2>/dev/null <<'PY' || echo "does not run"
import os, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 10):
    print("is Python %s; 3.10 or newer is needed" % version)
else:
    from importlib.util import find_spec
    if not find_spec("venv") or not find_spec("ensurepip"):
        print("has no venv module (Debian, Ubuntu: apt-get install python%s-venv)" % version)
    elif not os.environ.get("BERT_UNPAD_WHEEL") and not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        print("has no C headers (Debian, Ubuntu: apt-get install python%s-dev)" % version)
PY
}

# Prints why the model cannot be trained on this machine's GPU; nothing if it can. The check itself
# goes to stderr. A kernel that hangs must not hang the script.
gpu_problem() {
  local log status=0
  log=$(mktemp)
  timeout 300 "$PY" -m bert_unpad.info --check cuda 2>&1 | tee "$log" >&2 || status=${PIPESTATUS[0]}
  if [[ $status -eq 124 ]]; then
    echo "the check of its operators took longer than 300 s"
  elif [[ $status -ne 0 ]]; then
    grep -m 1 '^check failed' "$log" || tail -n 1 "$log"
  fi
  rm -f "$log"
}

# Sets PYTHON to the first usable interpreter.
find_python() {
  local name path problem
  local -a problems=() names=(python3 python3.13 python3.12 python3.11 python3.10)
  [[ -z ${BERT_UNPAD_PYTHON:-} ]] || names=("$BERT_UNPAD_PYTHON")
  for name in "${names[@]}"; do
    path=$(command -v "$name") || continue
    problem=$(python_problem "$path")
    if [[ -z $problem ]]; then
      PYTHON=$path
      return
    fi
    problems+=("$path $problem")
  done
  [[ ${#problems[@]} -gt 0 ]] || problems=("none of these was found: ${names[*]}")
  fail "no usable Python 3.10 or newer" "${problems[@]}" \
    "Install one, or name it: BERT_UNPAD_PYTHON=/path/to/python3 bash ${0#"$ROOT"/}"
}

# Exports CXX: $CXX if set, else g++, c++ or clang++, whichever first compiles C++20.
check_compiler() {
  local compiler found=
  local -a wanted=(g++ c++ clang++)
  [[ -z ${CXX:-} ]] || wanted=("$CXX")
  for compiler in "${wanted[@]}"; do
    command -v "${compiler%% *}" >/dev/null || continue
    found=$compiler
    # $CXX may hold options, for example "ccache g++".
    # shellcheck disable=SC2086
    if echo '#include <bit>
      static_assert(std::bit_cast<int>(0.0f) == 0);' |
      $compiler -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; then
      export CXX=$compiler
      return
    fi
  done
  [[ -z $found ]] || fail "the C++ compiler '$found' does not compile C++20" \
    "g++ 11 or clang++ 14 or newer is needed; set CXX to name one"
  fail "no C++ compiler was found (looked for ${wanted[*]})" \
    "Debian, Ubuntu: apt-get install g++    Fedora: dnf install gcc-c++" \
    "or set CXX to name one"
}

# check_disk GIGABYTES WHAT_FOR
check_disk() {
  local free
  free=$(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }')
  ((free >= $1 * 1000 * 1000)) || fail \
    "$((free / 1000 / 1000)) GB are free in $ROOT, but $2 needs about $1 GB"
}

# Prints "VERSION FOLDER" of a PyTorch that PYTHON itself has, if it is new enough and, on a machine
# with a GPU, built with CUDA.
usable_torch() {
  "$PYTHON" - "$GPU" 2>/dev/null <<'PY'
import os, sys
import torch
new_enough = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 11)
if new_enough and (torch.version.cuda or sys.argv[1] == "no"):
    print(torch.__version__, os.path.dirname(torch.__path__[0]))
PY
}

# Prints the newest CPU build (VERSION+cpu) that pip finds with the given options.
newest_cpu_torch() {
  "$PY" -m pip index versions torch "$@" 2>/dev/null | grep -oE '[0-9]+\.[0-9]+\.[0-9]+\+cpu' |
    awk -F. '$1 > 2 || $2 >= 11' | sort -rV | head -n 1
}

# Sets TORCH_ARGS, what pip is to install. A GPU gets PyPI's build, which is the CUDA one. Without a
# GPU that build would be gigabytes of dead weight, so a +cpu build is looked for first: where pip
# looks anyway (mirrors often have it), then on PyTorch's own index, which may be unreachable.
choose_torch() {
  local version
  if [[ -n ${BERT_UNPAD_TORCH:-} ]]; then
    note "PyTorch: $BERT_UNPAD_TORCH (from BERT_UNPAD_TORCH)"
    TORCH_ARGS=("$BERT_UNPAD_TORCH")
  elif [[ $GPU == yes ]]; then
    note "PyTorch: with CUDA, since this machine has an NVIDIA GPU"
    check_disk 12 "PyTorch with CUDA"
    TORCH_ARGS=("torch>=2.11")
  elif version=$(newest_cpu_torch) && [[ -n $version ]]; then
    note "PyTorch: $version, from pip's configured index"
    TORCH_ARGS=("torch==$version")
  elif version=$(newest_cpu_torch --timeout 8 --retries 0 --index-url "$TORCH_CPU_INDEX") &&
    [[ -n $version ]]; then
    note "PyTorch: $version, from $TORCH_CPU_INDEX"
    TORCH_ARGS=("torch==$version" --extra-index-url "$TORCH_CPU_INDEX")
  else
    note "PyTorch: pip's default build; no CPU-only build was found"
    [[ $(uname -s) != Linux ]] || check_disk 12 "PyTorch with CUDA"
    TORCH_ARGS=("torch>=2.11")
  fi
}

# The state that .venv depends on as a whole; a change makes it anew.
environment_key() {
  printf 'root=%s gpu=%s torch=%s python=%s\n' \
    "$ROOT" "$GPU" "${BERT_UNPAD_TORCH:-auto}" "${BERT_UNPAD_PYTHON:-auto}"
}

make_venv() {
  local torch found folder
  if [[ -e $VENV ]]; then
    if [[ -f $RECORDS/environment && $(<"$RECORDS/environment") == "$(environment_key)" ]] &&
      "$PY" -c '' 2>/dev/null; then
      note "reusing $VENV"
      return
    fi
    [[ -d $RECORDS ]] || fail "$VENV exists, but was not made by this script" \
      "move it away, or start with a new one: bash ${0#"$ROOT"/} --fresh"
    note "removing $VENV, which is incomplete or made for another setting"
    rm -rf "$VENV"
  fi
  find_python
  note "Python: $PYTHON ($("$PYTHON" -c 'import platform; print(platform.python_version())'))"
  found=
  [[ -n ${BERT_UNPAD_TORCH:-} ]] || found=$(usable_torch) || found=
  if [[ -n $found ]]; then check_disk 1 "the environment"; else check_disk 3 "the environment"; fi
  mkdir -p "$RECORDS" # first, so that what an interrupted run leaves is known as ours
  "$PYTHON" -m venv "$VENV" || fail "$PYTHON -m venv failed; its message is above"
  if [[ -n $found ]]; then
    read -r torch folder <<<"$found"
    note "PyTorch: $torch of $folder is used as it is"
    # A .pth file, not --system-site-packages, which would miss it where PYTHON is itself a venv's.
    echo "$folder" >"$("$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
    # Before Python 3.12 a venv has an old setuptools, which would hide a newer one in that folder.
    "$PY" -m pip uninstall -qq -y setuptools
  else
    choose_torch
    "$PY" -m pip install -qq "pip>=23" || fail "pip could not update itself; its message is above"
    # --no-compile: byte-compiling everything takes longer than doing so for what gets imported.
    "$PY" -m pip install --no-compile "${TORCH_ARGS[@]}" || fail "PyTorch could not be installed" \
      "without a network, give a Python that has it: BERT_UNPAD_PYTHON=/path/to/python3"
  fi
  environment_key >"$RECORDS/environment"
}

# Compiles what has changed since the last time; the modules land in bert_unpad/.
build() {
  (cd "$ROOT" && "$PY" setup.py -q build_ext --inplace) ||
    fail "the build failed; the compiler's message is above"
}

# Installs the package and the named extras, unless that is done for this pyproject.toml.
install() {
  local key recorded="" extra requirements joined missing=no
  local -a extras=("$@")
  key=$(cat "$ROOT/pyproject.toml" "$ROOT/setup.py" | sha256sum | cut -d ' ' -f 1)
  if [[ -f $RECORDS/installed && $(head -n 1 "$RECORDS/installed") == "$key" ]]; then
    recorded=$(tail -n 1 "$RECORDS/installed")
  fi
  for extra in "${extras[@]}"; do
    [[ " $recorded " == *" $extra "* ]] || missing=yes
  done
  if [[ $missing == no ]]; then
    step "Compiling what has changed"
    build
    return
  fi
  step "Installing what the build needs"
  requirements=$("$PY" - "$ROOT/pyproject.toml" <<'PY'
import ast, re, sys
text = open(sys.argv[1], encoding="utf-8").read()
print(*ast.literal_eval(re.search(r"^requires = (\[.*?\])", text, re.M | re.S)[1]), sep="\n")
print("torch")  # is there; named, so that pip respects the versions that it asks for
PY
  )
  "$PY" -m pip install -qq -r <(echo "$requirements") || fail "pip failed; its message is above"
  step "Compiling the operators (the first time takes a few minutes)"
  build
  for extra in $recorded; do
    [[ " ${extras[*]} " == *" $extra "* ]] || extras+=("$extra")
  done
  step "Installing bert_unpad with: ${extras[*]}"
  # Without build isolation: the build is done, with this environment's own tools.
  joined=$(IFS=,; echo "${extras[*]}")
  (cd "$ROOT" && "$PY" -m pip install -qq --no-compile --no-build-isolation -e ".[$joined]") ||
    fail "pip could not install bert_unpad; its message is above"
  printf '%s\n%s\n' "$key" "${extras[*]}" >"$RECORDS/installed"
}

# prepare EXTRA...: a current environment; with FRESH=yes a new one.
prepare() {
  step "Environment"
  if has_gpu; then GPU=yes; else GPU=no; fi
  if [[ -n ${BERT_UNPAD_WHEEL:-} ]]; then
    note "Compiled modules: of $BERT_UNPAD_WHEEL"
  else
    check_compiler
    note "C++ compiler: $CXX"
  fi
  if [[ ${FRESH:-no} == yes ]]; then
    rm -rf "$VENV" "$ROOT/build"
  fi
  make_venv
  install "$@"
}
