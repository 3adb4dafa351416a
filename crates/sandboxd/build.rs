//! Has the static binary start commands the cheap way.
//!
//! The standard library starts a process with `posix_spawn`, which copies no page tables, if libc can change the child's directory on
//! the way. It looks for that function by a weak reference, which does not bring it into a static binary, and forks where it is
//! missing.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |variable: &str, wanted: &str| {
        let value = std::env::var(variable).unwrap_or_default();
        value.split(',').any(|found| found == wanted)
    };
    if is("CARGO_CFG_TARGET_ENV", "gnu") && is("CARGO_CFG_TARGET_FEATURE", "crt-static") {
        println!("cargo::rustc-link-arg-bins=-Wl,--undefined=posix_spawn_file_actions_addchdir_np");
    }
}
