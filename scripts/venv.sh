# Sourced by the other scripts: a virtual environment with this checkout and what it needs.
#
#   UNICKPT_PYTHON  the Python to build it with (default: python3)
#   UNICKPT_VENV    where it is (default: the caller's choice, in the repository)
#   UNICKPT_TORCH   what to install as torch: arguments of pip install (default: torch==2.13.0). For CPU wheels
#                   on Linux: UNICKPT_TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

# use_venv EXTRAS DEFAULT_DIR: make or update the environment, then put it in PATH. Run in the repository's root.
use_venv() {
  local extras=$1 venv=${UNICKPT_VENV:-$2} torch=${UNICKPT_TORCH:-torch==2.13.0}
  local python=${UNICKPT_PYTHON:-python3} stamp wanted compiling=""
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "unickpt needs Python 3.10 or newer; name one with UNICKPT_PYTHON" >&2
    return 1
  fi
  [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
  venv=$(cd "$venv" && pwd)
  export PATH=$venv/bin:$PATH VIRTUAL_ENV=$venv PIP_DISABLE_PIP_VERSION_CHECK=1
  # DeepSpeed compiles here, and not in the home directory, where the result would outlive this torch.
  export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$venv/torch_extensions}
  # Otherwise each process compiles the sources of torch and DeepSpeed again: 5 s instead of 2 s to import them.
  unset PYTHONDONTWRITEBYTECODE
  [[ ",$extras," != *,deepspeed,* ]] || require_compiler || return 1

  stamp=$venv/unickpt-installed
  wanted="$(cat setup.py pyproject.toml unickpt/*/*/_*.[ch] | sha256sum | cut -c1-64) $PWD $extras $torch"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing torch, then unickpt[$extras], into $venv (some minutes, once)" >&2
    # torch first and alone: among the other requirements pip might choose another build of it, gigabytes larger.
    # Python compiles a module when it is first imported, and most of what is installed never is.
    # shellcheck disable=SC2086  # may hold options of pip as well
    python -m pip install -qq --no-compile $torch || return 1
    if [[ ",$extras," == *,deepspeed,* ]]; then
      python -m pip install -qq --no-compile --editable ".[deepspeed]" || return 1
      compile_operators "$venv/compile.log" & # while pip downloads the rest
      compiling=$!
    fi
    python -m pip install -qq --no-compile --editable ".[$extras]" || { [ -z "$compiling" ] || kill $compiling; return 1; }
    [ -z "$compiling" ] || wait $compiling || return 1
    echo "$wanted" >"$stamp"
  fi
}

# What DeepSpeed would otherwise compile while the ranks of a job wait, one process for each operator. $1: the log.
compile_operators() {
  local code='import sys; from deepspeed.accelerator import get_accelerator as g; g().create_op_builder(sys.argv[1]).load()'
  local builder pid failed="" pids=() compiler
  : >"$1"
  # c++ without the debug information that DeepSpeed asks for: 95 s instead of 128, 4 MB instead of 104. Not if CXX is set.
  compiler=$(mktemp -d "${1%/*}/compiler.XXXX")
  printf '#!/bin/sh\nexec "%s" "$@" -g0\n' "$(command -v c++)" >"$compiler/c++"
  chmod +x "$compiler/c++"
  for builder in ShareMemCommBuilder CPUAdamBuilder FusedAdamBuilder; do
    # without autoload: pip may be replacing this package's files at the moment
    PATH=$compiler:$PATH TORCH_DEVICE_BACKEND_AUTOLOAD=0 DS_ACCELERATOR=cpu python -c "$code" $builder >>"$1" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=yes; done
  rm -rf "$compiler"
  if [ -n "$failed" ]; then
    echo "DeepSpeed could not compile its operators for CPU; $1 ends with:" >&2
    tail -n 20 "$1" >&2
    return 1
  fi
}

# What DeepSpeed needs to compile with; said here, before it fails in the middle.
require_compiler() {
  local include
  include=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
  if ! echo '#include <Python.h>' | "${CXX:-c++}" -fsyntax-only -x c++ -I"$include" - 2>/dev/null; then
    echo "DeepSpeed on CPU needs a C++ compiler (${CXX:-c++}) and Python's headers ($include/Python.h)," >&2
    echo "on Debian or Ubuntu: apt install g++ python3-dev" >&2
    return 1
  fi
}
