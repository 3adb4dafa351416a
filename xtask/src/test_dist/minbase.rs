//! The package and the installer in Debian's smallest root file system, without systemd, as root and as an ordinary user.
//!
//! The root file system becomes that of a process with mount, PID and network namespaces of its own. It is not a chroot: the kernel
//! refuses user namespaces there, which sandboxes need.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};

use super::Release;

const SUITE: &str = "trixie";

/// Makes `$1` the root, and runs the script `/check` in it with the other arguments.
const ENTER: &str = r#"
set -eu
root=$1
shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
ip link set lo up
cd "$root"
pivot_root . .
umount -l .
exec /bin/sh -eu /check "$@"
"#;

/// Runs in the root file system. `$1` says whether Python is installed.
const CHECK: &str = r#"
python=$1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
fail() { echo "$1" >&2; exit 1; }
# answers USER PROGRAM: the sandboxes of a user compute.
answers() {
  if [ "$python" = yes ]; then
    set -- "$1" "$2" "python3 -c 'print(6*7)'"
  else
    set -- "$1" "$2" "sh -c 'echo \$((6*7))'"
  fi
  if [ "$1" = root ]; then
    answer=$(sh -c "$2 run -- $3" 2>/tmp/err) || fail "$1, $2: $(cat /tmp/err)"
  else
    answer=$(su - "$1" -c "$2 run -- $3" 2>/tmp/err) || fail "$1, $2: $(cat /tmp/err)"
  fi
  [ "$answer" = 42 ] || fail "$1, $2: printed $answer; $(cat /tmp/err)"
  echo "   $1: $2 run -- $3: $answer"
}

useradd --create-home --shell /bin/sh developer
[ ! -d /run/systemd/system ] || fail "systemd runs here"

dpkg --install /release/agent-sandbox.deb >/tmp/out 2>&1 || fail "$(cat /tmp/out)"
dpkg --status agent-sandbox | grep -q '^Status: install ok installed$' || fail "not installed"
answers root /usr/bin/agent-sandbox
answers developer /usr/bin/agent-sandbox
if [ "$python" = no ]; then
  code=0
  agent-sandbox run -- python3 -c 'print(6*7)' 2>/tmp/err || code=$?
  [ "$code" = 127 ] || fail "without Python: exit code $code"
  grep -q 'install the program on this machine' /tmp/err || fail "no hint: $(cat /tmp/err)"
fi

# A change of the administrator's survives an upgrade and a removal, and goes when the package is purged.
echo '# mine' >>/etc/default/agent-sandbox
dpkg --force-confdef --install /release/agent-sandbox.deb >/tmp/out 2>&1 || fail "$(cat /tmp/out)"
grep -q '^# mine$' /etc/default/agent-sandbox || fail "the configuration was replaced"
mkdir -p /var/lib/agent-sandbox
dpkg --remove agent-sandbox >/tmp/out 2>&1 || fail "$(cat /tmp/out)"
[ ! -e /usr/bin/agent-sandbox ] || fail "the program is left"
grep -q '^# mine$' /etc/default/agent-sandbox || fail "the configuration was removed"
dpkg --purge agent-sandbox >/tmp/out 2>&1 || fail "$(cat /tmp/out)"
[ ! -e /etc/default/agent-sandbox ] || fail "the configuration is left"
[ ! -e /var/lib/agent-sandbox ] || fail "the data directory is left"

sh /release/install.sh >/tmp/out 2>&1 || fail "$(cat /tmp/out)"
answers root /usr/local/bin/agent-sandbox
su - developer -c 'sh /release/install.sh' >/tmp/out 2>&1 || fail "$(cat /tmp/out)"
grep -q 'export PATH="/home/developer/.local/bin:' /tmp/out || fail "$(cat /tmp/out)"
answers developer /home/developer/.local/bin/agent-sandbox
"#;

pub fn check(release: &Release<'_>) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "a root file system is installed and entered by root: run as root, or name the other steps"
    );
    let roots: [(&str, &[&str]); 2] = [("no", &[]), ("yes", &["--include=python3"])];
    for (python, packages) in roots {
        let work = tempfile::tempdir()?;
        let root = work.path().join("root");
        install(&root, packages)?;
        add_release(release, &root)?;
        println!("-- Debian {SUITE}, minbase, Python: {python}");
        let status = Command::new("unshare")
            .args(["--mount", "--pid", "--net", "--fork", "--kill-child"])
            .args(["sh", "-c", ENTER, "sh"])
            .arg(&root)
            .arg(python)
            .status()
            .context("cannot run unshare")?;
        ensure!(status.success(), "in the root file system: {status}");
    }
    Ok(())
}

fn install(root: &Path, packages: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("mmdebstrap")
        .args(["--quiet", "--mode=root", "--variant=minbase"])
        .args(packages)
        .arg(SUITE)
        .arg(root)
        .output()
        .context("cannot run mmdebstrap: install Debian's package mmdebstrap")?;
    ensure!(
        output.status.success(),
        "mmdebstrap: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// What a user would have downloaded.
fn add_release(release: &Release<'_>, root: &Path) -> anyhow::Result<()> {
    let directory = root.join("release");
    let programs = Path::new("bin").join(release.target()?.triple());
    fs::create_dir_all(directory.join(&programs))?;
    let program = programs.join("agent-sandbox");
    for file in [
        Path::new("install.sh"),
        Path::new("SHA256SUMS"),
        program.as_path(),
    ] {
        fs::copy(release.directory.join(file), directory.join(file))
            .with_context(|| format!("copying {}", file.display()))?;
    }
    fs::copy(release.package_path()?, directory.join("agent-sandbox.deb"))?;
    fs::write(root.join("check"), CHECK)?;
    Ok(())
}
