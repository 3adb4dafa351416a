//! Pages the memory of frozen processes out to swap, with `process_madvise(MADV_PAGEOUT)`.

use std::fs;
use std::io::Read;
use std::process::ExitCode;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use shim_protocol::{PageOutAnswer, PageOutRequest};

use crate::syscalls;

pub fn run() -> ExitCode {
    let mut text = Vec::new();
    if std::io::stdin().read_to_end(&mut text).is_err() {
        return ExitCode::FAILURE;
    }
    let Ok(request) = serde_json::from_slice::<PageOutRequest>(&text) else {
        return ExitCode::FAILURE;
    };
    let resident = || {
        request
            .processes
            .iter()
            .map(|pid| resident_bytes(*pid))
            .sum()
    };
    let resident_before = resident();
    request.processes.iter().for_each(|pid| page_out(*pid));
    let answer = PageOutAnswer {
        resident_before,
        resident_after: resident(),
    };
    match serde_json::to_writer(std::io::stdout(), &answer) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Pages one process out. A process that has ended, and memory that cannot be paged out, are passed over.
fn page_out(pid: i32) {
    let Some(process) =
        Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
    else {
        return;
    };
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    for (start, length) in maps.lines().filter_map(private_range) {
        let _ = syscalls::page_out(&process, start, length);
    }
}

/// The range of a line of `/proc/PID/maps`, if it is private memory of the process.
fn private_range(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_whitespace();
    let (range, permissions) = (fields.next()?, fields.next()?);
    let name = fields.nth(3).unwrap_or_default();
    if !permissions.ends_with('p') || name.starts_with("[v") {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    Some((start, end.checked_sub(start)?))
}

fn resident_bytes(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes: Option<u64> =
        resident.and_then(|resident| resident.split_whitespace().next()?.parse().ok());
    kibibytes.unwrap_or(0).saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_memory_is_paged_out() {
        for (line, expected) in [
            ("1000-3000 rw-p 00000000 00:00 0", Some((0x1000, 0x2000))),
            (
                "1000-3000 rw-p 00000000 00:00 0    [heap]",
                Some((0x1000, 0x2000)),
            ),
            (
                "1000-3000 r--p 00000000 fe:00 77   /usr/lib/x.so",
                Some((0x1000, 0x2000)),
            ),
            ("1000-3000 rw-s 00000000 00:01 7    /dev/shm/x", None),
            ("1000-3000 r-xp 00000000 00:00 0    [vdso]", None),
            ("nonsense", None),
        ] {
            assert_eq!(private_range(line), expected, "{line}");
        }
    }
}
