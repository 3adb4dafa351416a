//! Writes a tar stream: ustar headers, with a PAX extended header where a field does not fit.

use std::io::{self, Read, Write};

const BLOCK_BYTES: usize = 512;
const NAME_BYTES: usize = 100;
/// The highest number in seven octal digits.
const OCTAL_7_MAX: u64 = 0o777_7777;
/// The highest number in eleven octal digits.
const OCTAL_11_MAX: u64 = 0o777_7777_7777;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryType {
    File,
    HardLink,
    Symlink,
    Directory,
    /// A PAX header for the next entry.
    Extended,
}

impl EntryType {
    const fn flag(self) -> u8 {
        match self {
            Self::File => b'0',
            Self::HardLink => b'1',
            Self::Symlink => b'2',
            Self::Directory => b'5',
            Self::Extended => b'x',
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Header<'a> {
    pub kind: EntryType,
    pub path: &'a [u8],
    /// The target of a link.
    pub link: &'a [u8],
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    /// Seconds since the epoch.
    pub modified: u64,
    /// Extended attributes, sorted by name.
    pub attributes: &'a [(String, Vec<u8>)],
}

#[derive(Debug)]
pub struct TarWriter<W> {
    out: W,
}

impl<W: Write> TarWriter<W> {
    pub fn new(out: W) -> Self {
        Self { out }
    }

    /// Writes an entry. `content` must have exactly `header.size` bytes.
    pub fn append(&mut self, header: &Header<'_>, content: impl Read) -> io::Result<()> {
        let records = extended_records(header);
        if !records.is_empty() {
            let extended = Header {
                kind: EntryType::Extended,
                path: b"PaxHeader",
                link: b"",
                mode: 0o644,
                uid: 0,
                gid: 0,
                size: records.len() as u64,
                modified: header.modified,
                attributes: &[],
            };
            self.entry(&extended, records.as_slice())?;
        }
        self.entry(header, content)
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.write_all(&[0; 2 * BLOCK_BYTES])?;
        Ok(self.out)
    }

    fn entry(&mut self, header: &Header<'_>, content: impl Read) -> io::Result<()> {
        self.out.write_all(&block(header))?;
        let written = io::copy(
            &mut content.take(header.size.saturating_add(1)),
            &mut self.out,
        )?;
        if written != header.size {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the file changed its size while it was read",
            ));
        }
        let rest = usize::try_from(header.size % BLOCK_BYTES as u64).unwrap_or_default();
        if rest > 0 {
            self.out.write_all(&[0; BLOCK_BYTES][rest..])?;
        }
        Ok(())
    }
}

fn block(header: &Header<'_>) -> [u8; BLOCK_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    put(&mut block[..NAME_BYTES], header.path);
    put_octal(&mut block[100..108], u64::from(header.mode & 0o7777));
    put_octal(&mut block[108..116], u64::from(header.uid));
    put_octal(&mut block[116..124], u64::from(header.gid));
    put_octal(&mut block[124..136], header.size);
    put_octal(&mut block[136..148], header.modified);
    block[148..156].fill(b' ');
    block[156] = header.kind.flag();
    put(&mut block[157..257], header.link);
    put(&mut block[257..265], b"ustar\x0000");
    let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    put(&mut block[148..156], format!("{sum:06o}\0 ").as_bytes());
    block
}

fn put(field: &mut [u8], value: &[u8]) {
    let length = value.len().min(field.len());
    field[..length].copy_from_slice(&value[..length]);
}

/// Octal digits and a final NUL. A number that does not fit is in the extended header, and its field is zero.
fn put_octal(field: &mut [u8], value: u64) {
    let digits = field.len().saturating_sub(1);
    let text = format!("{value:0digits$o}");
    let fitting = if text.len() > digits {
        "0".repeat(digits)
    } else {
        text
    };
    put(field, fitting.as_bytes());
}

/// The PAX records of everything that does not fit the header.
fn extended_records(header: &Header<'_>) -> Vec<u8> {
    let mut records = Vec::new();
    if header.path.len() > NAME_BYTES {
        record(&mut records, "path", header.path);
    }
    if header.link.len() > NAME_BYTES {
        record(&mut records, "linkpath", header.link);
    }
    for (key, value, max) in [
        ("uid", u64::from(header.uid), OCTAL_7_MAX),
        ("gid", u64::from(header.gid), OCTAL_7_MAX),
        ("size", header.size, OCTAL_11_MAX),
        ("mtime", header.modified, OCTAL_11_MAX),
    ] {
        if value > max {
            record(&mut records, key, value.to_string().as_bytes());
        }
    }
    for (name, value) in header.attributes {
        record(&mut records, &format!("SCHILY.xattr.{name}"), value);
    }
    records
}

/// Appends `<length> <key>=<value>\n`, where the length counts itself.
fn record(records: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(format!("{length} {key}=").as_bytes());
    records.extend_from_slice(value);
    records.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Header<'static> = Header {
        kind: EntryType::File,
        path: b"a",
        link: b"",
        mode: 0o640,
        uid: 7,
        gid: 8,
        size: 0,
        modified: 9,
        attributes: &[],
    };

    #[test]
    fn a_record_counts_its_own_length() {
        for size in 0..1200 {
            let mut records = Vec::new();
            record(&mut records, "path", &vec![b'x'; size]);
            let text = String::from_utf8(records).unwrap();
            let (length, _) = text.split_once(' ').unwrap();
            assert_eq!(length.parse::<usize>().unwrap(), text.len(), "{size}");
        }
    }

    #[test]
    fn another_reader_reads_long_names_and_large_numbers() {
        let long = [b"directory/".repeat(40), b"file".to_vec()].concat();
        let attributes = [("user.note".to_owned(), b"\0\x01binary".to_vec())];
        let header = Header {
            path: &long,
            uid: 4_000_000,
            size: 5,
            attributes: &attributes,
            ..FILE
        };
        let mut writer = TarWriter::new(Vec::new());
        writer.append(&header, &b"hello"[..]).unwrap();
        writer.append(&FILE, &b""[..]).unwrap();
        let bytes = writer.finish().unwrap();
        let mut archive = ::tar::Archive::new(bytes.as_slice());
        let mut entries = archive.entries().unwrap();
        let mut first = entries.next().unwrap().unwrap();
        assert_eq!(first.path_bytes().as_ref(), long.as_slice());
        let extensions: Vec<(String, Vec<u8>)> = first
            .pax_extensions()
            .unwrap()
            .unwrap()
            .map(|one| one.unwrap())
            .map(|one| (one.key().unwrap().to_owned(), one.value_bytes().to_vec()))
            .collect();
        assert!(extensions.contains(&("uid".to_owned(), b"4000000".to_vec())));
        assert!(
            extensions.contains(&("SCHILY.xattr.user.note".to_owned(), attributes[0].1.clone()))
        );
        let mut content = String::new();
        first.read_to_string(&mut content).unwrap();
        assert_eq!(content, "hello");
        let second = entries.next().unwrap().unwrap();
        assert_eq!(second.header().mode().unwrap(), 0o640);
        assert_eq!(second.header().gid().unwrap(), 8);
        assert_eq!(second.header().mtime().unwrap(), 9);
        assert!(entries.next().is_none());
    }

    #[test]
    fn a_file_that_changes_its_size_is_an_error() {
        for content in [&b"short"[..], &b"much too long"[..]] {
            let header = Header { size: 8, ..FILE };
            let mut writer = TarWriter::new(Vec::new());
            assert!(writer.append(&header, content).is_err());
        }
    }
}
