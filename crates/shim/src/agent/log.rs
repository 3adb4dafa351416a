//! The container's log: one line per line of output, in Kubernetes' CRI format (`time stream flag text`).
//!
//! The node rotates files and passes a new one to the agent; a line is never split between two files. A container that writes
//! faster than the node rotates is blocked until then. If the node does not rotate in time, lines are dropped, and the log reports that.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longer lines are written in parts, all but the last marked as partial.
const MAX_LINE_PART: usize = 16 << 10;

/// The size limit of a file, because all containers share the disk.
const MAX_FILE_BYTES: u64 = 16 << 20;
/// The largest log text for one read of output, if every line is empty.
const MAX_WRITE_BYTES: u64 = 2 << 20;
/// How long a container waits for a new file. The node checks every second.
const ROTATION_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

#[derive(Debug)]
pub struct Log {
    file: File,
    unfinished: [Vec<u8>; 2],
    /// Bytes written to this file, and bytes dropped because it was full.
    written: u64,
    dropped: u64,
    full_since: Option<Instant>,
}

impl Log {
    pub fn new(file: File) -> Self {
        Self {
            file,
            unfinished: [Vec::new(), Vec::new()],
            written: 0,
            dropped: 0,
            full_since: None,
        }
    }

    /// How long to stop reading output because the file is full.
    pub fn pause(&self, now: Instant) -> Option<Duration> {
        let waited = now.saturating_duration_since(self.full_since?);
        ROTATION_TIMEOUT
            .checked_sub(waited)
            .filter(|pause| !pause.is_zero())
    }

    pub fn replace(&mut self, file: File) {
        self.file = file;
        self.written = 0;
        self.full_since = None;
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            let note = format!(
                "({dropped} bytes of log were dropped: the container wrote faster than the log was rotated)"
            );
            let mut text = Vec::new();
            push_line(&mut text, &now(), Stream::Stderr, b"F", note.as_bytes());
            self.append(&text);
        }
    }

    fn append(&mut self, text: &[u8]) {
        let length = u64::try_from(text.len()).unwrap_or(u64::MAX);
        if self.written + length > MAX_FILE_BYTES {
            self.dropped += length;
            return;
        }
        self.written += length;
        if self.written + MAX_WRITE_BYTES > MAX_FILE_BYTES {
            self.full_since.get_or_insert_with(Instant::now);
        }
        // A full disk loses lines; it must not stop the container.
        let _ = self.file.write_all(text);
    }

    pub fn write(&mut self, stream: Stream, data: &[u8]) {
        let mut text = Vec::with_capacity(data.len() + 64);
        let stamp = now();
        let unfinished = &mut self.unfinished[stream as usize];
        for piece in data.split_inclusive(|&byte| byte == b'\n') {
            let mut rest = piece;
            while unfinished.len() + rest.len() > MAX_LINE_PART {
                let (head, tail) = rest.split_at(MAX_LINE_PART - unfinished.len());
                unfinished.extend_from_slice(head);
                rest = tail;
                push_line(&mut text, &stamp, stream, b"P", unfinished);
                unfinished.clear();
            }
            unfinished.extend_from_slice(rest);
            if unfinished.last() == Some(&b'\n') {
                unfinished.pop();
                push_line(&mut text, &stamp, stream, b"F", unfinished);
                unfinished.clear();
            }
        }
        self.append(&text);
    }

    /// Writes an incomplete last line; called when the command has ended.
    pub fn flush(&mut self) {
        for stream in [Stream::Stdout, Stream::Stderr] {
            if !self.unfinished[stream as usize].is_empty() {
                self.write(stream, b"\n");
            }
        }
    }
}

fn push_line(text: &mut Vec<u8>, stamp: &str, stream: Stream, flag: &[u8], line: &[u8]) {
    text.extend_from_slice(stamp.as_bytes());
    text.extend_from_slice(if stream == Stream::Stdout {
        b" stdout "
    } else {
        b" stderr "
    });
    text.extend_from_slice(flag);
    text.push(b' ');
    text.extend_from_slice(line);
    text.push(b'\n');
}

fn now() -> String {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    timestamp(since_epoch.unwrap_or_default().as_nanos())
}

/// RFC 3339 with nanoseconds, in UTC.
fn timestamp(since_epoch_ns: u128) -> String {
    let seconds = i64::try_from(since_epoch_ns / 1_000_000_000).unwrap_or(i64::MAX);
    let nanoseconds = since_epoch_ns % 1_000_000_000;
    let (days, of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days to a civil date, counting years from March so that a leap day comes last.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 {
        shifted_month + 3
    } else {
        shifted_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{nanoseconds:09}Z")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    #[test]
    fn timestamps_follow_the_calendar() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00.000000000Z");
        assert_eq!(
            timestamp(951_782_399_000_000_001),
            "2000-02-28T23:59:59.000000001Z"
        );
        assert_eq!(
            timestamp(951_782_400_000_000_000),
            "2000-02-29T00:00:00.000000000Z"
        );
        assert_eq!(
            timestamp(4_107_542_400_000_000_000),
            "2100-03-01T00:00:00.000000000Z"
        );
    }

    fn logged(pieces: &[(Stream, &[u8])]) -> Vec<String> {
        let file = tempfile();
        let mut log = Log::new(file.try_clone().unwrap());
        for (stream, data) in pieces {
            log.write(*stream, data);
        }
        log.flush();
        let mut text = String::new();
        let mut file = file;
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text.lines()
            .map(|line| line.split_once(' ').unwrap().1.to_owned())
            .collect()
    }

    fn tempfile() -> File {
        rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC)
            .unwrap()
            .into()
    }

    #[test]
    fn lines_are_joined_across_writes_and_separate_by_stream() {
        let lines = logged(&[
            (Stream::Stdout, b"a\nb"),
            (Stream::Stderr, b"x\n"),
            (Stream::Stdout, b"c\n\nend"),
        ]);
        assert_eq!(
            lines,
            [
                "stdout F a",
                "stderr F x",
                "stdout F bc",
                "stdout F ",
                "stdout F end"
            ]
        );
    }

    #[test]
    fn a_flood_stops_at_the_file_limit_and_is_reported_in_the_next_file() {
        let (first, second) = (tempfile(), tempfile());
        let mut log = Log::new(first.try_clone().unwrap());
        let line = [vec![b'z'; 8 << 10], b"\n".to_vec()].concat();
        for _ in 0..9 << 10 {
            log.write(Stream::Stdout, &line);
        }
        assert!(first.metadata().unwrap().len() <= MAX_FILE_BYTES);
        assert!(log.dropped > 0);
        log.replace(second.try_clone().unwrap());
        log.write(Stream::Stdout, b"after\n");
        let mut text = String::new();
        let mut second = second;
        second.rewind().unwrap();
        second.read_to_string(&mut text).unwrap();
        let mut lines = text.lines();
        assert!(lines.next().unwrap().contains("bytes of log were dropped"));
        assert!(lines.next().unwrap().ends_with("stdout F after"));
    }

    #[test]
    fn output_pauses_at_a_full_file_until_the_rotation_timeout() {
        let mut log = Log::new(tempfile());
        let began = Instant::now();
        let empty_lines = vec![b'\n'; 32 << 10];
        while log.pause(began).is_none() {
            log.write(Stream::Stdout, &empty_lines);
        }
        log.write(Stream::Stdout, &empty_lines);
        assert_eq!(log.dropped, 0, "the last read still fits");
        assert_eq!(log.pause(Instant::now() + ROTATION_TIMEOUT), None);
        log.replace(tempfile());
        assert_eq!(log.pause(began), None);
    }

    #[test]
    fn a_long_line_is_written_in_partial_lines() {
        let long = vec![b'z'; MAX_LINE_PART + 10];
        let lines = logged(&[(Stream::Stdout, &long), (Stream::Stdout, b"\n")]);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].len(), "stdout P ".len() + MAX_LINE_PART);
        assert_eq!(lines[1], "stdout F zzzzzzzzzz");
    }
}
