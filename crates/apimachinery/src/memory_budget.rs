//! How much memory a decoded body may take.
//!
//! A body of three megabytes can decode to hundreds: a map of one member costs seven bytes on the wire and an allocation of more than
//! half a kilobyte. Decoders charge each value before they keep it, so the bound holds while they read.

use std::mem::size_of;

use serde_json::Value;

/// Memory of the values of one body. The largest objects of real clusters take a tenth of it.
pub const BODY_BYTES: usize = 64 << 20;

/// The first member of a map allocates a whole node of a B-tree: eleven keys and values.
const MAP_BYTES: usize = 11 * (size_of::<String>() + size_of::<Value>());

/// The body would take more memory than it may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the body holds too many values")]
pub struct Exhausted;

/// The memory that is left to a decoder.
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

    /// What was charged so far.
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

    /// Charges a value with the bytes of its text, if it has one.
    pub fn value(&mut self, text_bytes: usize) -> Result<(), Exhausted> {
        self.charge(size_of::<Value>() + text_bytes)
    }

    /// Charges a member of a map that has `members` so far.
    pub fn member(&mut self, members: usize, key_bytes: usize) -> Result<(), Exhausted> {
        let node = if members == 0 { MAP_BYTES } else { 0 };
        self.charge(node + size_of::<String>() + key_bytes)
    }
}
