//! Makes the static binary start commands with `posix_spawn` instead of `fork`.
//!
//! The standard library starts a process with `posix_spawn`, which copies no page tables, if libc can change the child's
//! directory in that call. It finds that function by a weak reference, which does not link it into a static binary, and
//! forks if it is missing.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |variable: &str, wanted: &str| {
        let value = std::env::var(variable).unwrap_or_default();
        value.split(',').any(|found| found == wanted)
    };
    let is_static = is("CARGO_CFG_TARGET_FEATURE", "crt-static");
    if is_static && (is("CARGO_CFG_TARGET_ENV", "gnu") || is("CARGO_CFG_TARGET_ENV", "musl")) {
        println!("cargo::rustc-link-arg-bins=-uposix_spawn_file_actions_addchdir_np");
    }
}
