//! Reads a tar stream from untrusted bytes, entry by entry.
//!
//! It only parses and enforces limits, and does not access files. Extended headers are held in memory, so their size is limited,
//! unlike in general tar readers.

use std::io::{self, Read};

const BLOCK_BYTES: usize = 512;
/// A path has at most 4 KiB on Linux; extended attributes need some more.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("reading the layer")]
    Read(#[from] io::Error),
    #[error("the layer is not a tar archive: {0}")]
    Malformed(&'static str),
    #[error("the layer has an entry of type {0:?}, which is not supported")]
    Unsupported(char),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    File,
    Directory,
    Symlink,
    HardLink,
    Fifo,
    Device,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub kind: EntryKind,
    pub path: Vec<u8>,
    /// The target of a link. Empty for other kinds.
    pub link: Vec<u8>,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    /// Seconds since the Unix epoch.
    pub modified: i64,
    pub attributes: Vec<(String, Vec<u8>)>,
}

/// The fields that extended headers set for the entry that follows.
#[derive(Debug, Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    modified: Option<i64>,
    attributes: Vec<(String, Vec<u8>)>,
}

/// A tar reader. Its `Read` implementation returns the content of the current entry.
#[derive(Debug)]
pub struct TarReader<R> {
    inner: R,
    /// The remaining content of the current entry, in bytes.
    unread: u64,
    padding: u64,
}

impl<R: Read> TarReader<R> {
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            unread: 0,
            padding: 0,
        }
    }

    pub fn into_inner(self) -> R {
        self.inner
    }

    /// The next entry, or `None` at the end of the archive.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, TarError> {
        let mut extension = Extension::default();
        loop {
            self.skip_rest()?;
            let Some(header) = self.header()? else {
                return Ok(None);
            };
            let size = number(&header[124..136])?;
            match header[156] {
                b'x' => {
                    let text = self.extension_content(size)?;
                    parse_pax(&text, &mut extension)?;
                }
                b'g' => drop(self.extension_content(size)?),
                b'L' => extension.path = Some(without_trailing_nul(self.extension_content(size)?)),
                b'K' => extension.link = Some(without_trailing_nul(self.extension_content(size)?)),
                kind => return self.entry(&header, kind, size, extension).map(Some),
            }
        }
    }

    fn entry(
        &mut self,
        header: &[u8; BLOCK_BYTES],
        kind: u8,
        size: u64,
        extension: Extension,
    ) -> Result<Entry, TarError> {
        let path = extension.path.unwrap_or_else(|| header_path(header));
        let kind = match kind {
            // The oldest tar format has no type for directories and marks them by a trailing slash.
            b'0' | 0 if path.ends_with(b"/") => EntryKind::Directory,
            b'0' | b'7' | 0 => EntryKind::File,
            b'1' => EntryKind::HardLink,
            b'2' => EntryKind::Symlink,
            b'3' | b'4' => EntryKind::Device,
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            other => return Err(TarError::Unsupported(char::from(other))),
        };
        let size = extension.size.unwrap_or(size);
        let has_content = kind == EntryKind::File;
        self.begin(if has_content { size } else { 0 });
        if !has_content && size != 0 && kind != EntryKind::HardLink {
            return Err(TarError::Malformed("an entry without content has a size"));
        }
        let identity = |stated: Option<u32>, field: &[u8]| match stated {
            Some(value) => Ok(value),
            None => u32::try_from(number(field)?)
                .map_err(|_| TarError::Malformed("an owner is out of range")),
        };
        Ok(Entry {
            kind,
            path,
            link: extension
                .link
                .unwrap_or_else(|| until_nul(&header[157..257]).to_vec()),
            mode: u32::try_from(number(&header[100..108])? & 0o7777)
                .map_err(|_| TarError::Malformed("a mode is out of range"))?,
            uid: identity(extension.uid, &header[108..116])?,
            gid: identity(extension.gid, &header[116..124])?,
            size: if has_content { size } else { 0 },
            modified: extension.modified.unwrap_or_else(|| {
                number(&header[136..148])
                    .ok()
                    .and_then(|seconds| i64::try_from(seconds).ok())
                    .unwrap_or(0)
            }),
            attributes: extension.attributes,
        })
    }

    fn begin(&mut self, size: u64) {
        const BLOCK: u64 = BLOCK_BYTES as u64;
        self.unread = size;
        self.padding = (BLOCK - size % BLOCK) % BLOCK;
    }

    fn skip_rest(&mut self) -> Result<(), TarError> {
        let rest = self
            .unread
            .checked_add(self.padding)
            .ok_or(TarError::Malformed("an entry is larger than any file"))?;
        let skipped = io::copy(&mut (&mut self.inner).take(rest), &mut io::sink())?;
        (self.unread, self.padding) = (0, 0);
        if skipped == rest {
            Ok(())
        } else {
            Err(TarError::Malformed("the archive ends inside an entry"))
        }
    }

    fn header(&mut self) -> Result<Option<[u8; BLOCK_BYTES]>, TarError> {
        let mut block = [0; BLOCK_BYTES];
        let mut filled = 0;
        while filled < BLOCK_BYTES {
            match self.inner.read(&mut block[filled..])? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(TarError::Malformed("the archive ends inside a header")),
                count => filled += count,
            }
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let stated = number(&block[148..156])?;
        let sum: u64 = block
            .iter()
            .enumerate()
            .map(|(index, byte)| {
                u64::from(if (148..156).contains(&index) {
                    b' '
                } else {
                    *byte
                })
            })
            .sum();
        if sum == stated {
            Ok(Some(block))
        } else {
            Err(TarError::Malformed("a header's checksum is wrong"))
        }
    }

    fn extension_content(&mut self, size: u64) -> Result<Vec<u8>, TarError> {
        if size > EXTENSION_BYTES_MAX {
            return Err(TarError::Malformed("an extended header is too large"));
        }
        self.begin(size);
        let mut content = Vec::new();
        self.read_to_end(&mut content)?;
        if content.len() as u64 == size {
            Ok(content)
        } else {
            Err(TarError::Malformed(
                "the archive ends inside an extended header",
            ))
        }
    }
}

impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = buffer
            .len()
            .min(usize::try_from(self.unread).unwrap_or(usize::MAX));
        if wanted == 0 {
            return Ok(0);
        }
        let count = self.inner.read(&mut buffer[..wanted])?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.unread -= count as u64;
        Ok(count)
    }
}

fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

fn without_trailing_nul(mut text: Vec<u8>) -> Vec<u8> {
    let length = until_nul(&text).len();
    text.truncate(length);
    text
}

fn header_path(header: &[u8; BLOCK_BYTES]) -> Vec<u8> {
    let (name, prefix) = (until_nul(&header[..100]), until_nul(&header[345..500]));
    // The GNU format has times where POSIX has the first part of a long name.
    if &header[257..263] == b"ustar\0" && !prefix.is_empty() {
        [prefix, b"/", name].concat()
    } else {
        name.to_vec()
    }
}

/// Parses a number in octal digits, or in binary if it is too large for those.
fn number(field: &[u8]) -> Result<u64, TarError> {
    const BINARY: u8 = 0x80;
    let malformed = TarError::Malformed("a header field is not a number");
    if field.first().is_some_and(|first| first & BINARY != 0) {
        return field
            .iter()
            .enumerate()
            .map(|(index, byte)| if index == 0 { byte & !BINARY } else { *byte })
            .try_fold(0_u64, |value, byte| {
                Some(value.checked_mul(256)? | u64::from(byte))
            })
            .ok_or(malformed);
    }
    let text = until_nul(field).trim_ascii();
    text.iter()
        .try_fold(0_u64, |value, digit| match digit {
            b'0'..=b'7' => value.checked_mul(8)?.checked_add(u64::from(digit - b'0')),
            _ => None,
        })
        .ok_or(malformed)
}

/// Parses pax records of the form `<length> <key>=<value>\n`.
fn parse_pax(mut text: &[u8], extension: &mut Extension) -> Result<(), TarError> {
    const MALFORMED: TarError = TarError::Malformed("an extended header is malformed");
    while !text.is_empty() {
        let space = text
            .iter()
            .position(|byte| *byte == b' ')
            .ok_or(MALFORMED)?;
        let length: usize = std::str::from_utf8(&text[..space])
            .ok()
            .and_then(|digits| digits.parse().ok())
            .ok_or(MALFORMED)?;
        if length <= space + 1 || length > text.len() || text[length - 1] != b'\n' {
            return Err(MALFORMED);
        }
        let record = &text[space + 1..length - 1];
        let equals = record
            .iter()
            .position(|byte| *byte == b'=')
            .ok_or(MALFORMED)?;
        let key = std::str::from_utf8(&record[..equals]).map_err(|_| MALFORMED)?;
        take_pax(key, &record[equals + 1..], extension)?;
        text = &text[length..];
    }
    Ok(())
}

fn take_pax(key: &str, value: &[u8], extension: &mut Extension) -> Result<(), TarError> {
    const MALFORMED: TarError = TarError::Malformed("a value in an extended header is malformed");
    let text = || std::str::from_utf8(value).map_err(|_| MALFORMED);
    match key {
        "path" => extension.path = Some(value.to_vec()),
        "linkpath" => extension.link = Some(value.to_vec()),
        "size" => extension.size = Some(text()?.parse().map_err(|_| MALFORMED)?),
        "uid" => extension.uid = Some(text()?.parse().map_err(|_| MALFORMED)?),
        "gid" => extension.gid = Some(text()?.parse().map_err(|_| MALFORMED)?),
        "mtime" => {
            let whole = text()?.split('.').next().unwrap_or_default();
            extension.modified = Some(whole.parse().map_err(|_| MALFORMED)?);
        }
        _ if key.starts_with("GNU.sparse.") => return Err(TarError::Unsupported('S')),
        _ => {
            if let Some(name) = key.strip_prefix("SCHILY.xattr.") {
                extension.attributes.push((name.to_owned(), value.to_vec()));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn archive(paths: &[(&str, &[u8])]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, content) in paths {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o640);
            header.set_uid(7);
            header.set_gid(8);
            header.set_mtime(9);
            builder.append_data(&mut header, path, *content).unwrap();
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn entries_come_with_their_content_and_owners() {
        let long = format!("{}/file", "d".repeat(180));
        let bytes = archive(&[("a", b"one"), (&long, b""), ("c", &[1; 600])]);
        let mut reader = TarReader::new(bytes.as_slice());
        let mut seen = Vec::new();
        while let Some(entry) = reader.next_entry().unwrap() {
            let mut content = Vec::new();
            // The content of the second entry is not read, which must not affect the next entry.
            if entry.path != long.as_bytes() {
                reader.read_to_end(&mut content).unwrap();
            }
            assert_eq!(
                (entry.mode, entry.uid, entry.gid, entry.modified),
                (0o640, 7, 8, 9)
            );
            seen.push((String::from_utf8(entry.path).unwrap(), content.len()));
        }
        assert_eq!(
            seen,
            [("a".to_owned(), 3), (long, 0), ("c".to_owned(), 600)]
        );
    }

    #[test]
    fn a_too_large_extended_header_is_refused() {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::GNULongName);
        header.set_size(8 << 30);
        header.set_cksum();
        let stream = header.as_bytes().chain(io::repeat(b'a'));
        let error = TarReader::new(stream).next_entry().unwrap_err();
        assert!(error.to_string().contains("too large"), "{error}");
    }

    #[test]
    fn extended_headers_override_the_plain_ones() {
        let pax =
            b"12 uid=70000\n18 path=long/name\n13 mtime=5.25\n31 SCHILY.xattr.user.k=a\x00b=\n\n";
        let mut extension = Extension::default();
        // A record with a wrong length is refused, whatever its content.
        assert!(parse_pax(pax, &mut extension).is_err());
        let records: Vec<u8> = [
            ("uid", "70000"),
            ("path", "long/name"),
            ("mtime", "5.25"),
            ("SCHILY.xattr.user.k", "a=b"),
        ]
        .iter()
        .flat_map(|(key, value)| {
            let body = format!(" {key}={value}\n");
            let mut length = body.len() + 1;
            while length != body.len() + length.to_string().len() {
                length += 1;
            }
            format!("{length}{body}").into_bytes()
        })
        .collect();
        let mut extension = Extension::default();
        parse_pax(&records, &mut extension).unwrap();
        assert_eq!(extension.uid, Some(70000));
        assert_eq!(extension.path.as_deref(), Some(b"long/name".as_slice()));
        assert_eq!(extension.modified, Some(5));
        assert_eq!(
            extension.attributes,
            [("user.k".to_owned(), b"a=b".to_vec())]
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_give_entries_or_an_error(mut bytes in proptest::collection::vec(any::<u8>(), 0..2048), flips in proptest::collection::vec((0_usize..1536, any::<u8>()), 0..6)) {
            let mut sound = archive(&[("a/b", b"content"), ("c", b"")]);
            for (at, value) in flips {
                sound[at] = value;
            }
            for stream in [std::mem::take(&mut bytes), sound] {
                let mut reader = TarReader::new(stream.as_slice());
                let mut entries = 0;
                while let Ok(Some(_)) = reader.next_entry() {
                    entries += 1;
                    prop_assert!(entries < 100);
                }
            }
        }
    }
}
