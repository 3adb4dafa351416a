//! Swap for the memory of frozen pods: a zram device of the node's own, which the operator asks for.
//!
//! The device outlives the node's process, since it may hold the memory of pods that do, too. A file in the data directory names it. It is
//! removed when the node is configured without it, when the node is dismantled, and by `reset`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

const CONTROL: &str = "/sys/class/zram-control";
/// The file in the data directory that names the device.
const RECORD: &str = "freeze-swap";
/// Above every other swap, so that frozen memory does not go to a disk.
const PRIORITY: &str = "32767";

/// Swap in compressed memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreezeSwap {
    /// How much memory it holds, before compression.
    pub bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    #[error("write the swap of frozen sandboxes as zram:SIZE, as zram:2G")]
    Syntax,
    #[error("making a zram device ({path}); does the kernel have the module zram?")]
    Device {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("running {program}")]
    Run {
        program: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("{program} {device}: {message}")]
    Refused {
        program: &'static str,
        device: String,
        message: String,
    },
    #[error("writing down the name of the zram device")]
    Record(#[source] io::Error),
}

impl FromStr for FreezeSwap {
    type Err = SwapError;

    fn from_str(text: &str) -> Result<Self, SwapError> {
        let size = text.strip_prefix("zram:").ok_or(SwapError::Syntax)?;
        let (number, unit) = match size.char_indices().next_back() {
            Some((at, 'K')) => (&size[..at], 10),
            Some((at, 'M')) => (&size[..at], 20),
            Some((at, 'G')) => (&size[..at], 30),
            _ => (size, 0),
        };
        let number: u64 = number.parse().map_err(|_| SwapError::Syntax)?;
        let bytes = number.checked_mul(1 << unit);
        let bytes = bytes.filter(|bytes| *bytes >= 1 << 20);
        Ok(Self {
            bytes: bytes.ok_or(SwapError::Syntax)?,
        })
    }
}

/// Gives the node the swap that it is to have, or takes it away. Repeating it is harmless. Blocks.
pub fn apply(data_dir: &Path, wanted: Option<FreezeSwap>) -> Result<(), SwapError> {
    let record = data_dir.join(RECORD);
    let had = fs::read_to_string(&record).unwrap_or_default();
    let had = had.trim();
    if let Some(swap) = wanted
        && !had.is_empty()
        && is_active(had)
        && size_of(had) == Some(swap.bytes)
    {
        return Ok(());
    }
    if !had.is_empty() {
        remove(had)?;
        let _ = fs::remove_file(&record);
    }
    wanted.map_or(Ok(()), |swap| make(&record, swap))
}

fn make(record: &Path, swap: FreezeSwap) -> Result<(), SwapError> {
    let hot_add = Path::new(CONTROL).join("hot_add");
    let number = fs::read_to_string(&hot_add);
    let number = number.map_err(|source| SwapError::Device {
        path: hot_add,
        source,
    })?;
    let device = format!("zram{}", number.trim());
    // From here on a node that is killed finds the device again.
    fs::write(record, &device).map_err(SwapError::Record)?;
    let disksize = Path::new("/sys/block").join(&device).join("disksize");
    fs::write(&disksize, swap.bytes.to_string()).map_err(|source| SwapError::Device {
        path: disksize,
        source,
    })?;
    run("mkswap", &[], &device)?;
    run("swapon", &["-p", PRIORITY], &device)
}

fn remove(device: &str) -> Result<(), SwapError> {
    if is_active(device) {
        run("swapoff", &[], device)?;
    }
    // After a restart of the machine the device is gone, or another program's.
    let number = device.trim_start_matches("zram");
    if Path::new("/sys/block").join(device).exists() && size_of(device).is_some() {
        let _ = fs::write(Path::new(CONTROL).join("hot_remove"), number);
    }
    Ok(())
}

fn is_active(device: &str) -> bool {
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let path = format!("/dev/{device}");
    swaps
        .lines()
        .any(|line| line.split_whitespace().next() == Some(&path))
}

fn size_of(device: &str) -> Option<u64> {
    let path = Path::new("/sys/block").join(device).join("disksize");
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn run(program: &'static str, arguments: &[&str], device: &str) -> Result<(), SwapError> {
    let output = Command::new(program)
        .args(arguments)
        .arg(format!("/dev/{device}"))
        .output()
        .map_err(|source| SwapError::Run { program, source })?;
    if output.status.success() {
        return Ok(());
    }
    Err(SwapError::Refused {
        program,
        device: device.to_owned(),
        message: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_and_nonsense_is_refused() {
        for (text, bytes) in [
            ("zram:2G", 2 << 30),
            ("zram:64M", 64 << 20),
            ("zram:2048K", 2 << 20),
            ("zram:1048576", 1 << 20),
        ] {
            assert_eq!(text.parse::<FreezeSwap>().unwrap().bytes, bytes, "{text}");
        }
        for text in [
            "",
            "2G",
            "zram:",
            "zram:G",
            "zram:1",
            "zram:-1G",
            "file:2G",
            "zram:99999999999G",
        ] {
            assert!(text.parse::<FreezeSwap>().is_err(), "{text}");
        }
    }
}
