//! Paging memory of processes out.

use serde::{Deserialize, Serialize};

/// The processes whose memory is paged out.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PageOutRequest {
    /// In the PID namespace of the node.
    pub processes: Vec<i32>,
}

/// The memory that the processes had, and have now, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageOutAnswer {
    pub resident_before: u64,
    pub resident_after: u64,
}
