//! Reading container logs, as `pods/log` serves them.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::mpsc;

use crate::{ContainerId, Runtime};

const FOLLOW_INTERVAL: Duration = Duration::from_millis(50);

/// The options of a log request.
#[derive(Debug, Clone, Default)]
pub struct LogOptions {
    pub follow: bool,
    pub tail_lines: Option<usize>,
    pub since: Option<Timestamp>,
    pub timestamps: bool,
    pub limit_bytes: Option<u64>,
    /// Only lines of this stream, `stdout` or `stderr`.
    pub stream: Option<&'static str>,
}

/// One line of a log file.
#[derive(Debug, PartialEq, Eq)]
struct Line<'a> {
    stamp: &'a str,
    stream: &'a [u8],
    /// Whether the line continues in the next entry (flag `P`).
    partial: bool,
    text: &'a [u8],
}

fn parse(line: &[u8]) -> Option<Line<'_>> {
    let mut parts = line.splitn(4, |byte| *byte == b' ');
    let stamp = std::str::from_utf8(parts.next()?).ok()?;
    let stream = parts.next()?;
    let partial = parts.next()? == b"P";
    let text = parts.next()?;
    Some(Line {
        stamp,
        stream,
        partial,
        text: text.strip_suffix(b"\n").unwrap_or(text),
    })
}

/// The end of a log as a termination message (`FallbackToLogsOnError`): at most 80 lines and 2 KiB.
pub fn last_words(log: &Path) -> Option<String> {
    const MOST_LINES: usize = 80;
    const MOST_BYTES: usize = 2048;
    // Reads more than the limit, because the time and the stream of each line do not count.
    const READ_BYTES: u64 = 16 << 10;
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(READ_BYTES)))
        .ok()?;
    let mut read = Vec::new();
    io::Read::read_to_end(&mut file, &mut read).ok()?;
    let mut texts: Vec<&[u8]> = Vec::new();
    for line in read
        .split_inclusive(|byte| *byte == b'\n')
        .rev()
        .take(MOST_LINES)
    {
        texts.extend(parse(line).map(|line| line.text));
    }
    texts.reverse();
    let joined = texts.join(&b'\n');
    let end = &joined[joined.len().saturating_sub(MOST_BYTES)..];
    let text = String::from_utf8_lossy(end).into_owned();
    (!text.is_empty()).then_some(text)
}

/// A log's files, oldest first.
fn files(log: &Path) -> Vec<PathBuf> {
    let rotated = (1..100)
        .map(|number| log.with_extension(format!("log.{number}")))
        .take_while(|path| path.exists());
    let mut files: Vec<PathBuf> = rotated.collect();
    files.reverse();
    files.push(log.to_owned());
    files
}

/// Formats and selects log lines as a request asks for.
struct Filter {
    options: LogOptions,
    sent: u64,
    in_line: bool,
}

impl Filter {
    fn take(&mut self, raw: &[u8]) -> Option<Vec<u8>> {
        let line = parse(raw)?;
        let wanted = self.options.stream;
        if wanted.is_some_and(|stream| stream.as_bytes() != line.stream) {
            return None;
        }
        if let Some(since) = self.options.since
            && line.stamp.parse::<Timestamp>().is_ok_and(|at| at < since)
        {
            return None;
        }
        let mut output = Vec::with_capacity(raw.len());
        if self.options.timestamps && !self.in_line {
            output.extend_from_slice(line.stamp.as_bytes());
            output.push(b' ');
        }
        output.extend_from_slice(line.text);
        if !line.partial {
            output.push(b'\n');
        }
        self.in_line = line.partial;
        if let Some(limit) = self.options.limit_bytes {
            let left = usize::try_from(limit - self.sent).unwrap_or(usize::MAX);
            output.truncate(left);
        }
        self.sent += output.len() as u64;
        Some(output)
    }

    fn is_full(&self) -> bool {
        self.options
            .limit_bytes
            .is_some_and(|limit| self.sent >= limit)
    }
}

/// Where the last `count` lines of the concatenated files begin: a file and an offset in it.
fn tail(files: &[PathBuf], count: usize) -> io::Result<(usize, u64)> {
    let mut left = count;
    for (index, path) in files.iter().enumerate().rev() {
        let mut starts = Vec::new();
        let mut offset = 0;
        let mut fresh = true;
        let mut reader = BufReader::new(File::open(path)?);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 {
            if fresh {
                starts.push(offset);
            }
            fresh = parse(&line).is_none_or(|parsed| !parsed.partial);
            offset += line.len() as u64;
            line.clear();
        }
        if starts.len() >= left {
            let start = if left == 0 {
                offset
            } else {
                starts[starts.len() - left]
            };
            return Ok((index, start));
        }
        left -= starts.len();
    }
    Ok((0, 0))
}

/// Sends a container's log to `sender`, until its end, or until the container has ended when following.
pub async fn stream<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    options: LogOptions,
    sender: mpsc::Sender<Vec<u8>>,
) -> io::Result<()> {
    let log = runtime.log_path(id);
    let files = files(&log);
    let (first, offset) = match options.tail_lines {
        Some(count) => tail(&files, count)?,
        None => (0, 0),
    };
    let follow = options.follow;
    let mut filter = Filter {
        options,
        sent: 0,
        in_line: false,
    };
    let mut offset = offset;
    for path in &files[first..files.len() - 1] {
        let mut reader = open_at(path, offset)?;
        offset = 0;
        if !copy(&mut reader, &mut Vec::new(), &mut filter, &sender).await? {
            return Ok(());
        }
    }
    let mut reader = open_at(&log, offset)?;
    let mut pending = Vec::new();
    loop {
        // Checked before reading, so that everything written before the end is read.
        let over = !follow || runtime.has_ended(id);
        if !copy(&mut reader, &mut pending, &mut filter, &sender).await? || over {
            return Ok(());
        }
        if was_rotated(&reader, &log) {
            copy(&mut reader, &mut pending, &mut filter, &sender).await?;
            reader = open_at(&log, 0)?;
            continue;
        }
        tokio::select! {
            () = sender.closed() => return Ok(()),
            () = tokio::time::sleep(FOLLOW_INTERVAL) => {}
        }
    }
}

fn open_at(path: &Path, offset: u64) -> io::Result<BufReader<File>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    Ok(BufReader::new(file))
}

fn was_rotated(reader: &BufReader<File>, log: &Path) -> bool {
    let inode = |metadata: io::Result<std::fs::Metadata>| metadata.map(|found| found.ino()).ok();
    inode(reader.get_ref().metadata()) != inode(std::fs::metadata(log))
}

/// Sends all complete lines. Returns false when the client has disconnected or has all it asked for. An incomplete line stays in
/// `pending`.
async fn copy(
    reader: &mut BufReader<File>,
    pending: &mut Vec<u8>,
    filter: &mut Filter,
    sender: &mpsc::Sender<Vec<u8>>,
) -> io::Result<bool> {
    loop {
        if reader.read_until(b'\n', pending)? == 0 || pending.last() != Some(&b'\n') {
            return Ok(true);
        }
        let output = filter.take(pending);
        pending.clear();
        if let Some(output) = output
            && sender.send(output).await.is_err()
        {
            return Ok(false);
        }
        if filter.is_full() {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
2026-01-01T00:00:00.000000001Z stdout F one
2026-01-01T00:00:01.000000000Z stderr P tw
2026-01-01T00:00:01.000000001Z stderr F o
2026-01-01T00:00:02.000000000Z stdout F three
";

    fn filtered(options: LogOptions) -> String {
        let mut filter = Filter {
            options,
            sent: 0,
            in_line: false,
        };
        let output: Vec<u8> = LOG
            .split_inclusive('\n')
            .filter_map(|line| filter.take(line.as_bytes()))
            .flatten()
            .collect();
        String::from_utf8(output).unwrap()
    }

    #[test]
    fn lines_are_joined_stamped_and_selected_by_time() {
        assert_eq!(filtered(LogOptions::default()), "one\ntwo\nthree\n");
        let stamped = filtered(LogOptions {
            timestamps: true,
            ..LogOptions::default()
        });
        assert_eq!(
            stamped.lines().nth(1),
            Some("2026-01-01T00:00:01.000000000Z two")
        );
        let since = Some("2026-01-01T00:00:02Z".parse().unwrap());
        assert_eq!(
            filtered(LogOptions {
                since,
                ..LogOptions::default()
            }),
            "three\n"
        );
        assert_eq!(
            filtered(LogOptions {
                stream: Some("stderr"),
                ..LogOptions::default()
            }),
            "two\n"
        );
        assert_eq!(
            filtered(LogOptions {
                limit_bytes: Some(6),
                ..LogOptions::default()
            }),
            "one\ntw"
        );
    }

    #[test]
    fn a_tail_counts_whole_lines_across_rotated_files() {
        let directory = tempfile::tempdir().unwrap();
        let paths = [
            directory.path().join("0.log.1"),
            directory.path().join("0.log"),
        ];
        let (old, new) = LOG.split_at(LOG.find("2026-01-01T00:00:02").unwrap());
        std::fs::write(&paths[0], old).unwrap();
        std::fs::write(&paths[1], new).unwrap();
        assert_eq!(files(&paths[1]), paths);
        assert_eq!(tail(&paths, 0).unwrap(), (1, new.len() as u64));
        assert_eq!(tail(&paths, 1).unwrap(), (1, 0));
        assert_eq!(
            tail(&paths, 2).unwrap(),
            (0, LOG.find("2026-01-01T00:00:01").unwrap() as u64)
        );
        assert_eq!(tail(&paths, 9).unwrap(), (0, 0));
    }
}
