#!/usr/bin/env bash
# Makes .venv at the root of the repository and installs ParaLLM there with the build of MLX that fits this machine.
# A second call does nothing until pyproject.toml or the fitting build changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "parallm: $*" >&2; }

find_python() {
  local python
  for python in python3.13 python3.12 python3.11 python3; do
    # a name on the PATH may be a stub that does not start
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null </dev/null; then
      echo "$python"
      return
    fi
  done
  say "Python 3.11 or newer is needed and was not found; install python3.11 or newer and call this again"
  return 1
}

fitting_extra() {
  if [[ "$(uname -s)" == Darwin ]]; then
    return # the plain install brings Metal
  fi
  local cuda
  cuda="$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[^:]*Version: *\([0-9]*\)\..*/\1/p' | head -n 1 || true)"
  if [[ -n "$cuda" && "$cuda" -ge 13 ]]; then
    echo cuda13
  elif [[ "$cuda" == 12 ]]; then
    echo cuda12
  else
    echo cpu
  fi
}

make_environment() {
  local python
  python="$(find_python)"
  say "making .venv with $("$python" --version)"
  "$python" -m venv --clear .venv || {
    say "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
    return 1
  }
}

# With signs of life; what the installer says goes to a file, its errors to the terminal, too. pip takes longer than uv,
# and is asked where uv finds nothing, as behind proxies that pip alone is set up for. Neither compiles the 12,000
# modules, which takes nearly as long as all else; commands import 1,000.
install() {
  local log=.venv/parallm-install.log way is_done=false
  : >"$log"
  for way in with_uv with_pip; do
    if "$way" "$1" </dev/null 2>&1 | tee -a "$log" | show_progress; then
      is_done=true
      break
    fi
  done
  $is_done || {
    grep -i '^ *error' "$log" >&2 || tail -n 20 "$log" >&2
    say "the installation failed; all of it stands in $PWD/$log"
    return 1
  }
  # a command says itself why it cannot start
  PYTHONDONTWRITEBYTECODE='' .venv/bin/python -c 'import parallm.run.train' </dev/null 2>>"$log" || true
}

with_uv() {
  local index
  index="${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}"
  .venv/bin/python -m pip install --quiet --no-input --no-color --disable-pip-version-check --no-compile uv &&
    .venv/bin/python -m uv pip install --python .venv/bin/python --color never --no-progress \
      ${index:+--default-index "$index"} --editable "$1"
}

with_pip() {
  PYTHONUNBUFFERED=1 .venv/bin/python -m pip install --no-input --no-color --disable-pip-version-check \
    --progress-bar off --no-compile --editable "$1"
}

show_progress() { # on a terminal one line that moves every second, elsewhere one every 20 seconds
  local line status doing="asking for packages" count=0 last=$SECONDS began=$SECONDS
  while true; do
    status=0
    IFS= read -r -t 1 line || status=$?
    if ((status == 0)); then
      case "$line" in
        "Collecting "*)
          count=$((count + 1))
          line="${line#Collecting }"
          doing="package $count: ${line%% (*}"
          ;;
        "Installing collected packages:"*) doing="writing $count packages to .venv" ;;
        "Resolved "*) doing="downloading ${line#Resolved }" ;;
        "Prepared "*) doing="writing ${line#Prepared }" ;;
      esac
    elif ((status <= 128)); then # the end, and not a second without a line
      break
    fi
    if [[ -t 2 ]]; then
      printf '\r\033[Kparallm: %.60s (%d s)' "$doing" $((SECONDS - began)) >&2
    elif ((SECONDS - last >= 20)); then
      say "$doing ($((SECONDS - began)) s)"
      last=$SECONDS
    fi
  done
  if [[ -t 2 ]]; then printf '\r\033[K' >&2; fi
}

extra="$(fitting_extra)"
extras="${extra:+$extra,}dev"
wanted="$PWD $extras $(cksum <pyproject.toml)"
stamp=.venv/parallm-installed

.venv/bin/python -m pip --version >/dev/null 2>&1 </dev/null || make_environment
if [[ ! -f "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
  say "installing parallm[$extras] into .venv (minutes the first time)"
  install ".[$extras]"
  echo "$wanted" >"$stamp"
  say "installed"
fi
