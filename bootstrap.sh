#!/bin/sh
# Sets up all that laoka needs on a fresh Debian or Ubuntu machine, then runs the main job on the sandbox, or the tests.
#   sudo sh bootstrap.sh demo   bare sandbox host to an answering model, with a simulated V100
#   sudo sh bootstrap.sh test   the tests, the sandbox ones included
# Safe to run again; the second time only runs. Removes nothing that it did not make.
set -eu
cd "$(dirname "$0")"

usage() { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 1 ] || usage
job=$1; shift
case $job in demo|test) ;; *) usage ;; esac

if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "bootstrap: the sandbox needs root, and there is no sudo here: run this as root" >&2; exit 2; }
  exec sudo --preserve-env=LANG,LC_ALL,http_proxy,https_proxy,no_proxy sh "$PWD/bootstrap.sh" "$job" "$@"
fi
command -v apt-get >/dev/null || { echo "bootstrap: this needs Debian or Ubuntu (apt-get is not here)" >&2; exit 2; }

python=
for name in python3 python3.13 python3.12 python3.11 python3.10; do
  if command -v $name >/dev/null && $name -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then python=$name; break; fi
done
[ -n "$python" ] || { echo "bootstrap: laoka needs Python 3.10 to 3.13: apt-get install python3" >&2; exit 2; }

# tool it brings / package / what for
missing=
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }
need debootstrap debootstrap; need systemd-nspawn systemd-container; need nft nftables; need ip iproute2; need gcc gcc
need dpkg-deb dpkg; need apt-ftparchive apt-utils; need ssh openssh-client; need mkfs.ext4 e2fsprogs; need unshare util-linux
if [ "$job" = test ]; then
  need qemu-system-x86_64 qemu-system-x86; need qemu-img qemu-utils; need make make
fi
[ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
$python -c 'import venv, ensurepip' 2>/dev/null || missing="$missing $(basename "$(readlink -f "$(command -v $python)")")-venv"
[ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing="$missing debian-archive-keyring"

# The environment is made anew when Python or what it should hold changed; a killed run leaves no stamp.
extra=
[ "$job" = demo ] || extra=" --group dev"
wanted=$(cat pyproject.toml constraints.txt | cksum)"$($python -V)"
stamp=.venv/laoka-$job
[ -e .venv/laoka-test ] && [ "$job" = demo ] && stamp=.venv/laoka-test
python_packages=" Python packages in .venv (about 60 MB)"
[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ] || python_packages=

if [ -n "$missing$python_packages" ]; then
  echo "laoka: to be installed here:${missing:+$missing (Debian packages, 60 to 120 MB);}$python_packages" >&2
else
  echo "laoka: this machine has the packages it needs" >&2
fi
if [ "$job" = demo ]; then
  echo "laoka: the sandbox needs a Debian tree (about 95 MB) and a real vLLM for CPU (about 610 MB): fetched when not here yet" >&2
else
  echo "laoka: the tests need a Debian tree (about 95 MB), a real vLLM for CPU (about 610 MB) and an image for virtual machines (about 145 MB): fetched when not here yet" >&2
fi

if [ -n "$missing" ]; then
  echo "laoka: installing$missing" >&2
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086
  { apt-get -o DPkg::Lock::Timeout=120 -q update && apt-get -o DPkg::Lock::Timeout=120 -q -y --no-install-recommends install $missing; } >&2
fi

if [ -n "$python_packages" ]; then
  echo "laoka: Python packages into .venv" >&2
  [ -x .venv/bin/python ] || { rm -rf .venv; $python -m venv .venv; }
  .venv/bin/python -m pip install -qq --disable-pip-version-check --upgrade "pip>=25.1"
  # shellcheck disable=SC2086
  .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[operator]'$extra
  echo "$wanted" > "$stamp"
fi

if [ "$job" = demo ]; then
  exec .venv/bin/laoka sandbox demo "$@"
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
[ $# = 0 ] || exec .venv/bin/python -m pytest "$@"
.venv/bin/python -m pytest -q -n 3 tests/unit      # they wait for children more than they compute
# Two halves side by side, each with hosts of its own: those that serve a model, and all others. SIGTERM ends them as Ctrl-C does, and
# their hosts with them; what runs in the background would not hear Ctrl-C itself.
serving=$(mktemp)
.venv/bin/python -m pytest -v --durations=25 tests/sandbox tests/served > "$serving" 2>&1 &
half=$!
trap 'kill -TERM $half 2>/dev/null; wait $half; rm -f "$serving"; exit 130' INT TERM
failed=0
.venv/bin/python -m pytest -v --durations=25 --ignore tests/unit --ignore tests/sandbox --ignore tests/served || failed=$?
echo "laoka: waiting for the tests on hosts that serve" >&2
wait $half || failed=$?
cat "$serving"
rm -f "$serving"
exit $failed
