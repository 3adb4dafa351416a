#!/bin/sh
# Installs the program agent-sandbox from a release: a directory that `cargo xtask dist` has written, or a URL where one is served.
#
#   ./install.sh                                     from the directory of this script
#   curl -fsS URL/install.sh | sh -s -- --from URL   from a server
#
# The program is checked against SHA256SUMS of the release. That file is only as trustworthy as the way it came: use HTTPS.
set -eu

usage() {
  cat <<'TEXT'
Usage: install.sh [--from URL|DIRECTORY] [--to DIRECTORY]

  --from URL|DIRECTORY  the release            [the directory of this script]             AGENT_SANDBOX_RELEASE
  --to DIRECTORY        where to install       [/usr/local/bin as root, else ~/.local/bin] AGENT_SANDBOX_BIN
TEXT
}

fail() {
  printf 'install.sh: %s\n' "$1" >&2
  exit 1
}

from=${AGENT_SANDBOX_RELEASE:-}
to=${AGENT_SANDBOX_BIN:-}
while [ $# -gt 0 ]; do
  case $1 in
    --from | --to)
      [ $# -ge 2 ] || fail "$1 needs a value"
      if [ "$1" = --from ]; then from=$2; else to=$2; fi
      shift 2
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    *)
      usage >&2
      fail "unknown argument $1"
      ;;
  esac
done

if [ -z "$from" ]; then
  here=$(dirname -- "$0")
  [ -f "$here/SHA256SUMS" ] || fail "there is no release beside this script: name one with --from URL or --from DIRECTORY"
  from=$here
fi
from=${from%/}

[ "$(uname -s)" = Linux ] || fail "agent-sandbox runs on Linux, not on $(uname -s)"
case $(uname -m) in
  x86_64 | amd64) triple=x86_64-unknown-linux-musl ;;
  aarch64 | arm64) triple=aarch64-unknown-linux-musl ;;
  *) fail "there is no program for $(uname -m): build it with cargo" ;;
esac

if [ -z "$to" ]; then
  if [ "$(id -u)" = 0 ]; then
    to=/usr/local/bin
  else
    to=${HOME:?HOME is not set: name a directory with --to}/.local/bin
  fi
fi

# fetch PATH FILE: copies a file of the release.
fetch() {
  case $from in
    http://* | https://*)
      if command -v curl >/dev/null 2>&1; then
        curl --fail --silent --show-error --location --output "$2" "$from/$1" || fail "cannot fetch $from/$1"
      elif command -v wget >/dev/null 2>&1; then
        wget -q -O "$2" "$from/$1" || fail "cannot fetch $from/$1"
      else
        fail "curl or wget is needed to fetch $from/$1: install one, or copy the release here and pass its directory"
      fi
      ;;
    *) cp -- "$from/$1" "$2" || fail "cannot copy $from/$1" ;;
  esac
}

checksum() {
  if command -v sha256sum >/dev/null 2>&1; then
    sha256sum "$1"
  elif command -v shasum >/dev/null 2>&1; then
    shasum -a 256 "$1"
  else
    fail "sha256sum is needed to check the program"
  fi
}

mkdir -p -- "$to" || fail "cannot create $to: name another directory with --to"
work=$(mktemp -d "$to/.agent-sandbox.XXXXXX") || fail "cannot write to $to: name another directory with --to"
trap 'rm -rf -- "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

path=bin/$triple/agent-sandbox
fetch SHA256SUMS "$work/SHA256SUMS"
expected=$(sed -n "s|^\([0-9a-f]\{64\}\)  $path\$|\1|p" "$work/SHA256SUMS")
[ -n "$expected" ] || fail "the release $from has no $path"
fetch "$path" "$work/agent-sandbox"
actual=$(checksum "$work/agent-sandbox")
actual=${actual%% *}
[ "$actual" = "$expected" ] || fail "$from/$path is not the program of the release: expected sha256 $expected, got $actual; nothing was installed"

chmod 755 "$work/agent-sandbox"
# One rename: a running program keeps its file, and no half program is ever there.
mv -f -- "$work/agent-sandbox" "$to/agent-sandbox"
for name in agent-sandbox-controller sandbox-router; do
  ln -sf agent-sandbox "$to/$name"
done

printf 'installed %s\n' "$("$to/agent-sandbox" --version)"
printf 'in %s; next:\n\n' "$to"
case :$PATH: in
  *:"$to":*) ;;
  *) printf '  export PATH="%s:%s"\n' "$to" "\$PATH" ;;
esac
# A sandbox of `run` shows the programs of this machine.
if command -v python3 >/dev/null 2>&1; then
  printf "  agent-sandbox run -- python3 -c 'print(6*7)'\n"
else
  printf "  agent-sandbox run -- sh -c 'echo \$((6*7))'\n"
fi
