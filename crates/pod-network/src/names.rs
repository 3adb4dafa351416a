//! The names of a node's interfaces, nftables table and cgroup, all derived from its data directory.

use std::fmt::Write;
use std::path::Path;

use sha2::{Digest, Sha256};

/// The first bytes of a SHA-256, in hexadecimal.
pub fn short_hash(data: impl AsRef<[u8]>, bytes: usize) -> String {
    Sha256::digest(data)
        .iter()
        .take(bytes)
        .fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// How many nodes a machine can have. Each has its own ranges of addresses, UIDs and priorities of routing rules.
pub const NODES_MAX: u32 = 15;

/// A node's names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// Eight hexadecimal digits.
    pub tag: String,
    /// The interface with the node's own address for pods.
    pub holder: String,
    /// The nftables table.
    pub table: String,
    /// The parent of all pods' cgroups.
    pub cgroup: String,
    /// The index on the machine that the node claims if it is free. Its ranges of UIDs and addresses follow from the index.
    pub preferred_index: u32,
}

impl Names {
    pub fn of(data_dir: &Path) -> Self {
        let tag = short_hash(data_dir.as_os_str().as_encoded_bytes(), 4);
        let preferred_index = u32::from_str_radix(&tag, 16).unwrap_or(0);
        Self {
            holder: format!("asb-{tag}"),
            table: format!("agent_sandbox_{tag}"),
            cgroup: format!("agent-sandbox-{tag}"),
            preferred_index,
            tag,
        }
    }

    /// The prefix of the names of all pods' links.
    pub fn link_prefix(&self) -> String {
        format!("as{}", &self.tag[..6])
    }

    /// Whether an interface belongs to this node.
    pub fn is_link(&self, name: &str) -> bool {
        name == self.holder || self.slot_of(name).is_some()
    }

    /// The slot whose link has this name.
    pub fn slot_of(&self, link: &str) -> Option<u32> {
        let slot = link.strip_prefix(&self.link_prefix())?;
        u32::from_str_radix(slot, 16).ok()
    }

    /// The name of the host's end of a pod's link. Interface names have at most 15 bytes.
    pub fn link(&self, slot: u32) -> String {
        format!("{}{slot:x}", self.link_prefix())
    }
}
