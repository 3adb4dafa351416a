//! Content digests: SHA-256 in OCI notation, and a reader that computes one.

use std::fmt;
use std::io::{self, Read};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

const PREFIX: &str = "sha256:";
const HEX_DIGITS: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a digest of the form sha256:<64 hexadecimal digits>")]
pub struct InvalidDigest(String);

/// `sha256:<hex>`. It can only be created by parsing or hashing, so it is safe to use as a file name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(String);

impl Digest {
    pub fn parse(text: &str) -> Result<Self, InvalidDigest> {
        let digits = text.strip_prefix(PREFIX).unwrap_or_default();
        let is_lower_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if digits.len() == HEX_DIGITS && digits.bytes().all(is_lower_hex) {
            Ok(Self(digits.to_owned()))
        } else {
            Err(InvalidDigest(text.to_owned()))
        }
    }

    pub fn of(data: impl AsRef<[u8]>) -> Self {
        Self::from_hash(Sha256::new_with_prefix(data))
    }

    pub(crate) fn from_hash(hash: Sha256) -> Self {
        Self(format!("{:x}", hash.finalize()))
    }

    /// The hexadecimal digits without the prefix.
    pub fn hex(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{PREFIX}{}", self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self}")
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// Hashes and counts the bytes that are read through it.
pub(crate) struct HashingReader<R> {
    inner: R,
    hash: Sha256,
}

impl<R: Read> HashingReader<R> {
    pub fn new(inner: R) -> Self {
        Self {
            inner,
            hash: Sha256::new(),
        }
    }

    pub fn digest(self) -> Digest {
        Digest::from_hash(self.hash)
    }
}

impl<R: Read> Read for HashingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.hash.update(&buffer[..count]);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_well_formed_digest_parses() {
        let good = format!("sha256:{}", "0a".repeat(32));
        assert_eq!(Digest::parse(&good).unwrap().to_string(), good);
        for bad in [
            "",
            "sha256:",
            "sha512:00",
            "sha256:../../etc/passwd",
            &good.to_uppercase(),
            &good[..good.len() - 1],
            &format!("{good}0"),
        ] {
            assert!(Digest::parse(bad).is_err(), "{bad}");
        }
    }
}
