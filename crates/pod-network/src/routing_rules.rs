//! Policy routing that makes the pods' network fail closed.
//!
//! The nftables table marks each packet that it has judged with [`ADMITTED`]. These rules of the routing policy database (`ip rule`)
//! drop what comes from or goes to a pod's address without that mark, before the kernel looks for a local address. So without the
//! table (`nft flush ruleset`) nothing passes, neither to another pod nor to the machine nor to the network. The node's addresses
//! are in the pods' range: a neighbour on another interface does not reach them either (the weak host model would let it).
//!
//! ```text
//! base + 0   iif lo                        goto LOCAL     packets that this machine sends itself are not judged
//! base + 1   from RANGE to NODE            lookup local   only without nftables: the link filters alone judge
//! base + 2   from RANGE fwmark 0/ADMITTED  blackhole
//! base + 3   to RANGE   fwmark 0/ADMITTED  blackhole
//! LOCAL      from all                      lookup local   was at 0, where nothing can precede it
//! ```
//!
//! Computing the rules is pure. A file lock prevents two nodes of a machine from moving the local table's rule concurrently.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use futures::TryStreamExt;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::route::RouteProtocol;
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{Handle, IpVersion};

use super::address_block::AddressBlock;
use super::links::{Forwarding, NetworkError};

/// The bit of the packet mark that the table sets on packets that it has judged.
pub const ADMITTED: u32 = 0x1000_0000;

/// The priority of the local table's rule while a node has rules. Other software that must precede the local table uses the same.
const LOCAL: u32 = 100;
/// The first node's first rule.
const FIRST: u32 = 20;
const RULES_PER_NODE: u32 = 5;
const LOCAL_TABLE: u8 = 255;
const FILE_EXISTS: i32 = -17;

/// The properties of a node that its rules depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    /// The node's index on its machine.
    pub node_index: u32,
    /// The ranges of the pods' addresses, at most one per family.
    pub ranges: Vec<AddressBlock>,
    /// The node's own addresses in those ranges.
    pub node: Vec<IpAddr>,
    pub forwarding: Forwarding,
}

/// The fields that distinguish two rules.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PolicyRule {
    family: AddressFamily,
    priority: u32,
    action: RuleAction,
    incoming: Option<String>,
    from: Option<AddressBlock>,
    to: Option<AddressBlock>,
}

impl PolicyRule {
    fn new(family: AddressFamily, priority: u32, action: RuleAction) -> Self {
        Self {
            family,
            priority,
            action,
            incoming: None,
            from: None,
            to: None,
        }
    }

    /// The rule of the local table.
    fn local(family: AddressFamily, priority: u32) -> Self {
        Self::new(family, priority, RuleAction::ToTable)
    }

    fn message(&self) -> RuleMessage {
        let mut message = RuleMessage::default();
        message.header.family = self.family;
        message.header.action = self.action;
        // With the protocol `kernel`: network daemons remove only rules of other protocols that they did not configure.
        message.attributes = vec![
            RuleAttribute::Priority(self.priority),
            RuleAttribute::Protocol(RouteProtocol::Kernel),
        ];
        match self.action {
            RuleAction::ToTable => message.header.table = LOCAL_TABLE,
            RuleAction::Goto => message.attributes.push(RuleAttribute::Goto(LOCAL)),
            _ => message
                .attributes
                .extend([RuleAttribute::FwMark(0), RuleAttribute::FwMask(ADMITTED)]),
        }
        if let Some(name) = &self.incoming {
            let name = RuleAttribute::Iifname(name.clone());
            message.attributes.push(name);
        }
        if let Some(block) = self.from {
            message.header.src_len = block.length();
            let source = RuleAttribute::Source(block.address());
            message.attributes.push(source);
        }
        if let Some(block) = self.to {
            message.header.dst_len = block.length();
            let destination = RuleAttribute::Destination(block.address());
            message.attributes.push(destination);
        }
        message
    }

    fn of(message: &RuleMessage) -> Self {
        // The kernel omits a priority of zero.
        let mut rule = Self::new(message.header.family, 0, message.header.action);
        for attribute in &message.attributes {
            match attribute {
                RuleAttribute::Priority(priority) => rule.priority = *priority,
                RuleAttribute::Iifname(name) => rule.incoming = Some(name.clone()),
                RuleAttribute::Source(address) => {
                    rule.from = Some(AddressBlock::new(*address, message.header.src_len));
                }
                RuleAttribute::Destination(address) => {
                    rule.to = Some(AddressBlock::new(*address, message.header.dst_len));
                }
                _ => {}
            }
        }
        rule
    }
}

/// The rules of a node. Pure.
fn wanted(scope: &Scope) -> Vec<PolicyRule> {
    let base = FIRST + scope.node_index * RULES_PER_NODE;
    let mut rules = Vec::new();
    for range in &scope.ranges {
        let family = family_of(range);
        rules.push(PolicyRule {
            incoming: Some("lo".to_owned()),
            ..PolicyRule::new(family, base, RuleAction::Goto)
        });
        let own = scope.node.iter().find(|own| range.contains(**own));
        if let (Forwarding::Off, Some(own)) = (scope.forwarding, own) {
            rules.push(PolicyRule {
                from: Some(*range),
                to: Some(AddressBlock::single(*own)),
                ..PolicyRule::new(family, base + 1, RuleAction::ToTable)
            });
        }
        rules.push(PolicyRule {
            from: Some(*range),
            ..PolicyRule::new(family, base + 2, RuleAction::Blackhole)
        });
        rules.push(PolicyRule {
            to: Some(*range),
            ..PolicyRule::new(family, base + 3, RuleAction::Blackhole)
        });
    }
    rules
}

fn family_of(block: &AddressBlock) -> AddressFamily {
    if block.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

fn is_of(node_index: u32, priority: u32) -> bool {
    let base = FIRST + node_index * RULES_PER_NODE;
    (base..base + RULES_PER_NODE).contains(&priority)
}

/// Installs a node's rules, then removes those of an earlier run with another range, so that protection never lapses. Idempotent.
pub async fn install(handle: &Handle, lock: &Path, scope: &Scope) -> Result<(), NetworkError> {
    let _lock = lock_exclusively(lock).await?;
    let wanted = wanted(scope);
    for range in &scope.ranges {
        let family = family_of(range);
        let local = PolicyRule::local(family, LOCAL);
        add(handle, &local).await?;
        for rule in wanted.iter().filter(|rule| rule.family == family) {
            add(handle, rule).await?;
        }
        for found in list(handle, family).await? {
            let rule = PolicyRule::of(&found);
            let is_stale = is_of(scope.node_index, rule.priority) && !wanted.contains(&rule);
            if is_stale || is_original_local(&found) {
                delete(handle, found).await?;
            }
        }
    }
    Ok(())
}

/// Removes a node's rules. With those of the last node, the local table's rule returns to its original priority.
pub async fn remove(handle: &Handle, lock: &Path, node_index: u32) -> Result<(), NetworkError> {
    let _lock = lock_exclusively(lock).await?;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        // A kernel without this address family has no rules.
        let Ok(found) = list(handle, family).await else {
            continue;
        };
        let (own, others): (Vec<_>, Vec<_>) = found
            .into_iter()
            .partition(|found| is_of(node_index, PolicyRule::of(found).priority));
        if own.is_empty() {
            continue;
        }
        let is_needed = |found: &RuleMessage| (1..LOCAL).contains(&PolicyRule::of(found).priority);
        if !others.iter().any(is_needed) {
            add(handle, &PolicyRule::local(family, 0)).await?;
        }
        for rule in own {
            delete(handle, rule).await?;
        }
        if !others.iter().any(is_needed) {
            delete(handle, PolicyRule::local(family, LOCAL).message()).await?;
        }
    }
    Ok(())
}

fn is_original_local(found: &RuleMessage) -> bool {
    PolicyRule::of(found) == PolicyRule::local(found.header.family, 0)
        && found.header.table == LOCAL_TABLE
}

async fn lock_exclusively(path: &Path) -> Result<File, NetworkError> {
    let path = path.to_owned();
    let lock = move || -> io::Result<File> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory)?;
        }
        let file = File::create(&path)?;
        file.lock()?;
        Ok(file)
    };
    let locked = tokio::task::spawn_blocking(lock).await;
    locked
        .unwrap_or_else(|died| Err(io::Error::other(died)))
        .map_err(NetworkError::RulesLock)
}

async fn list(handle: &Handle, family: AddressFamily) -> Result<Vec<RuleMessage>, NetworkError> {
    let version = match family {
        AddressFamily::Inet6 => IpVersion::V6,
        _ => IpVersion::V4,
    };
    let listed = handle.rule().get(version).execute().try_collect().await;
    listed.map_err(|source| NetworkError::Netlink {
        operation: "listing routing rules".to_owned(),
        source,
    })
}

async fn add(handle: &Handle, rule: &PolicyRule) -> Result<(), NetworkError> {
    let mut request = handle.rule().add();
    *request.message_mut() = rule.message();
    match request.execute().await {
        Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == FILE_EXISTS => Ok(()),
        other => other.map_err(|source| NetworkError::Netlink {
            operation: "adding a routing rule, which isolates pods (the kernel needs policy routing: CONFIG_IP_MULTIPLE_TABLES)"
                .to_owned(),
            source,
        }),
    }
}

async fn delete(handle: &Handle, rule: RuleMessage) -> Result<(), NetworkError> {
    let deleted = handle.rule().del(rule).execute().await;
    deleted.map_err(|source| NetworkError::Netlink {
        operation: "removing a routing rule".to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(forwarding: Forwarding) -> Scope {
        Scope {
            node_index: 2,
            ranges: vec![
                "10.202.0.0/16".parse().unwrap(),
                "fd00:1::/64".parse().unwrap(),
            ],
            node: vec!["10.202.0.1".parse().unwrap(), "fd00:1::1".parse().unwrap()],
            forwarding,
        }
    }

    #[test]
    fn unmarked_packets_of_both_families_are_dropped_in_both_directions() {
        let rules = wanted(&scope(Forwarding::On));
        for range in scope(Forwarding::On).ranges {
            let drops = |rule: &&PolicyRule| {
                rule.action == RuleAction::Blackhole && rule.family == family_of(&range)
            };
            let dropped: Vec<_> = rules.iter().filter(drops).collect();
            assert_eq!(dropped.len(), 2);
            assert_eq!(dropped[0].from, Some(range));
            assert_eq!(dropped[1].to, Some(range));
            for rule in dropped {
                let message = rule.message();
                assert!(message.attributes.contains(&RuleAttribute::FwMark(0)));
                let mask = RuleAttribute::FwMask(ADMITTED);
                assert!(message.attributes.contains(&mask));
            }
        }
        assert!(!rules.iter().any(|rule| rule.action == RuleAction::ToTable));
    }

    #[test]
    fn without_nftables_pods_reach_only_the_node() {
        let rules = wanted(&scope(Forwarding::Off));
        let local: Vec<_> = rules
            .iter()
            .filter(|rule| rule.action == RuleAction::ToTable)
            .filter_map(|rule| rule.to)
            .collect();
        let node = scope(Forwarding::Off).node.into_iter();
        assert_eq!(local, node.map(AddressBlock::single).collect::<Vec<_>>());
    }

    #[test]
    fn the_priorities_of_all_nodes_precede_the_local_table_and_do_not_overlap() {
        use crate::names::NODES_MAX;
        let mut seen = std::collections::BTreeSet::new();
        for node_index in 0..NODES_MAX {
            let scope = Scope {
                node_index,
                ..scope(Forwarding::Off)
            };
            for rule in wanted(&scope) {
                assert!(rule.priority < LOCAL && is_of(node_index, rule.priority));
                let is_ipv4 = rule.family == AddressFamily::Inet;
                assert!(seen.insert((is_ipv4, rule.priority)));
            }
        }
    }

    #[test]
    fn a_rule_equals_itself_as_listed_by_the_kernel() {
        for rule in wanted(&scope(Forwarding::Off)) {
            assert_eq!(PolicyRule::of(&rule.message()), rule);
        }
    }
}
