//! Limits the memory of a decoded request body.
//!
//! A body of 3 MB can decode to hundreds of megabytes: a map with one member takes seven bytes in JSON and more than half a
//! kilobyte in memory. Decoders charge each value before they store it, so the limit holds while they decode.

use std::mem::size_of;

use serde_json::Value;

/// The memory limit for the values of one body. The largest objects of real clusters need a tenth of it.
pub const BODY_BYTES: usize = 64 << 20;

/// The first member of a map allocates a whole B-tree node: eleven keys and values.
const MAP_BYTES: usize = 11 * (size_of::<String>() + size_of::<Value>());

/// The error for a body that exceeds its memory limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the body holds too many values")]
pub struct Exhausted;

/// The memory that a decoder may still use.
#[derive(Debug)]
pub struct MemoryBudget {
    spent: usize,
    limit: usize,
}

impl Default for MemoryBudget {
    fn default() -> Self {
        Self::new(BODY_BYTES)
    }
}

impl MemoryBudget {
    pub fn new(limit: usize) -> Self {
        Self { spent: 0, limit }
    }

    /// The number of bytes charged so far.
    pub fn spent(&self) -> usize {
        self.spent
    }

    /// Charges any number of bytes.
    pub fn charge(&mut self, bytes: usize) -> Result<(), Exhausted> {
        self.spent = self.spent.saturating_add(bytes);
        if self.spent > self.limit {
            return Err(Exhausted);
        }
        Ok(())
    }

    /// Charges a value, with the length of its text if it is a string.
    pub fn value(&mut self, text_bytes: usize) -> Result<(), Exhausted> {
        self.charge(size_of::<Value>() + text_bytes)
    }

    /// Charges a member of a map that already has `members` members.
    pub fn member(&mut self, members: usize, key_bytes: usize) -> Result<(), Exhausted> {
        let node = if members == 0 { MAP_BYTES } else { 0 };
        self.charge(node + size_of::<String>() + key_bytes)
    }
}
