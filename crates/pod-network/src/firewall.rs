//! Writes rules as nftables transactions, and runs `nft`.
//!
//! Writing the text is pure. Everything of a node is in one table:
//!
//! ```text
//! prerouting   a pod sends only from its own addresses; a neighbour reaches no address of the node's interface for pods
//! admit        marks the packets that the routing rules let pass (see routing_rules)
//! forward  ──► judge ──► outgoing ──► chain of the pod that opened the connection      (egress)
//!                    └─► incoming ──► chain of the pod it was opened to               (ingress)
//! input        pods do not reach the machine, except to respond to it and to query its resolver
//! output       which users of the machine reach pods
//! postrouting  source NAT of packets that leave the machine
//! ```
//!
//! Every packet is judged by the direction in which its connection was opened, responses included. So a connection that the rules no
//! longer allow is cut at its next packet, in both directions.
//!
//! A change is one transaction: the kernel judges each packet by all of the old rules or all of the new ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::address_block::AddressBlock;
use super::policy::{Chain, Direction, Peers, Rule, Rules};
use super::routing_rules::ADMITTED;
use super::table_monitor::MARKERS;
use crate::names::Names;

/// The nftables program, searched in `PATH`.
pub const PROGRAM: &str = "nft";
const CONNECTIONS_PER_POD: u32 = 4096;
/// The most members per command, which limits the length of a line.
const MEMBERS_PER_COMMAND: usize = 512;

/// The table without the rules of particular pods. Words in capitals are placeholders.
const FRAME: &str = r#"table inet TABLE {
  map ingress4 { type ipv4_addr : verdict; }
  map ingress6 { type ipv6_addr : verdict; }
  map egress4 { type ipv4_addr : verdict; }
  map egress6 { type ipv6_addr : verdict; }
  set connections4 { type ipv4_addr; size 65535; flags dynamic; }
  set connections6 { type ipv6_addr; size 65535; flags dynamic; }
  set MARKERS { type mark; flags timeout; timeout 60s; }
  chain prerouting {
    type filter hook prerouting priority raw; policy accept;
    iifname "LINKS*" fib saddr . iif oif missing drop
    OWN_ADDRESSES
  }
  chain admit {
    type filter hook prerouting priority dstnat + 10; policy accept;
    iifname "LINKS*" meta mark set meta mark | ADMITTED
    TO_PODS
  }
  chain outgoing {
    ct original ip saddr vmap @egress4
    ct original ip6 saddr vmap @egress6
    UNKNOWN_OPENERS
  }
  chain incoming {
    ct original ip daddr vmap @ingress4
    ct original ip6 daddr vmap @ingress6
    UNKNOWN_TARGETS
  }
  chain crowd {
    ct state new ct direction original add @connections4 { ip saddr ct count over CONNECTIONS_PER_POD } drop
    ct state new ct direction original add @connections6 { ip6 saddr ct count over CONNECTIONS_PER_POD } drop
  }
  chain judge {
    ct state invalid drop
    ct state related meta l4proto { icmp, icmpv6 } accept
    iifname "LINKS*" jump crowd
    jump outgoing
    jump incoming
    accept
  }
  chain forward {
    type filter hook forward priority filter - 5; policy accept;
    iifname "LINKS*" jump judge
    oifname "LINKS*" jump judge
  }
  chain machine {
    ct state established,related ct direction reply accept
    jump crowd
    QUESTIONS
    drop
  }
  chain asked {
    jump outgoing
    accept
  }
  chain input {
    type filter hook input priority filter - 5; policy accept;
    iifname "LINKS*" jump machine
  }
  chain output {
    type filter hook output priority filter - 5; policy accept;
    OTHER_USERS
  }
  chain postrouting {
    type nat hook postrouting priority srcnat; policy accept;
    LEAVING
  }
}
"#;

#[derive(Debug, thiserror::Error)]
pub enum FirewallError {
    #[error("running nft, which is needed to isolate pods (install nftables)")]
    Run(#[source] std::io::Error),
    #[error("nft refused the rules: {0}")]
    Refused(String),
}

/// The properties of a node's network that its rules depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Surroundings {
    /// The nftables program.
    pub program: PathBuf,
    pub table: String,
    /// The prefix of the names of all pods' links.
    pub links: String,
    /// The ranges of the pods' addresses.
    pub ranges: Vec<AddressBlock>,
    /// The addresses of the node's resolver.
    pub resolver: Vec<IpAddr>,
    /// The users of this machine that reach pods by their addresses; all users when absent.
    pub local_users: Option<Vec<u32>>,
}

impl Surroundings {
    pub fn new(
        program: PathBuf,
        names: &Names,
        ranges: Vec<AddressBlock>,
        resolver: Vec<IpAddr>,
    ) -> Self {
        Self {
            program,
            table: names.table.clone(),
            links: names.link_prefix(),
            ranges,
            resolver,
            local_users: None,
        }
    }

    /// Lets only these users of the machine reach pods.
    #[must_use]
    pub fn reached_by(self, local_users: Option<Vec<u32>>) -> Self {
        Self {
            local_users,
            ..self
        }
    }

    /// The transaction that replaces the whole table.
    pub fn whole(&self, rules: &Rules) -> String {
        let mut text = format!(
            "add table inet {0}\ndelete table inet {0}\n{1}",
            self.table,
            self.frame()
        );
        text.push_str(&self.change(&Rules::default(), rules).unwrap_or_default());
        text
    }

    /// The command that marks a transaction as the node's own.
    pub fn mark(&self, marker: u32) -> String {
        format!(
            "add element inet {} {MARKERS} {{ {marker:#x} }}\n",
            self.table
        )
    }

    /// The constant part of the table. By itself it lets pods respond to the node, and nothing else.
    fn frame(&self) -> String {
        // Drops addresses of the range that no known pod has. Packets that a pod's chain accepts do not get here: the maps `goto`
        // that chain, which returns to the caller of `judge`.
        let unknown = |side: &str| {
            Self::lines(&self.ranges, |range| {
                let word = Family::of_block(range).word;
                format!("ct original {word} {side} {range} drop")
            })
        };
        let asked = Self::lines(&self.resolver, |address| {
            let word = Family::of(address).word;
            format!("{word} daddr {address} meta l4proto {{ tcp, udp }} th dport 53 jump asked")
        });
        // Linux accepts packets for any of its addresses on any interface (weak host model).
        let own = Self::lines(&self.resolver, |address| {
            let word = Family::of(address).word;
            format!("iifname != \"lo\" iifname != \"LINKS*\" {word} daddr {address} drop")
        });
        let to_pods = Self::lines(&self.ranges, |range| {
            let word = Family::of_block(range).word;
            format!("{word} daddr {range} meta mark set meta mark | ADMITTED")
        });
        let leaving = Self::lines(&self.ranges, |range| {
            let word = Family::of_block(range).word;
            format!("{word} saddr {range} oifname != \"LINKS*\" masquerade")
        });
        // Responses to pods pass, and so do packets of the kernel itself: they have no socket, so a match on the socket's user fails.
        let other_users = Self::lines(self.local_users.as_slice(), |users| {
            let users: Vec<String> = users.iter().map(ToString::to_string).collect();
            let users = users.join(", ");
            format!(
                "oifname \"LINKS*\" ct direction original meta skuid != {{ {users} }} reject with icmpx admin-prohibited"
            )
        });
        FRAME
            .replace("    OTHER_USERS\n", &other_users)
            .replace("    UNKNOWN_OPENERS\n", &unknown("saddr"))
            .replace("    UNKNOWN_TARGETS\n", &unknown("daddr"))
            .replace("    QUESTIONS\n", &asked)
            .replace("    LEAVING\n", &leaving)
            .replace("    OWN_ADDRESSES\n", &own)
            .replace("    TO_PODS\n", &to_pods)
            .replace("ADMITTED", &format!("{ADMITTED:#x}"))
            .replace("CONNECTIONS_PER_POD", &CONNECTIONS_PER_POD.to_string())
            .replace("MARKERS", MARKERS)
            .replace("TABLE", &self.table)
            .replace("LINKS", &self.links)
    }

    fn lines<T>(items: &[T], line: impl Fn(&T) -> String) -> String {
        items.iter().fold(String::new(), |mut text, item| {
            let _ = writeln!(text, "    {}", line(item));
            text
        })
    }

    /// The transaction that changes one set of rules into another. `None` if they are equal.
    pub fn change(&self, old: &Rules, new: &Rules) -> Option<String> {
        if old == new {
            return None;
        }
        let mut text = String::new();
        let empty = BTreeSet::new();
        for (name, members) in &new.sets {
            if !old.sets.contains_key(name) {
                self.add_set(&mut text, name);
            }
            self.change_members(
                &mut text,
                name,
                old.sets.get(name).unwrap_or(&empty),
                members,
            );
        }
        for (name, chain) in &new.chains {
            if !old.chains.contains_key(name) {
                self.add_chain(&mut text, name, chain);
            }
        }
        self.change_map(&mut text, "ingress", &old.ingress, &new.ingress);
        self.change_map(&mut text, "egress", &old.egress, &new.egress);
        let gone = |name: &&String| !new.chains.contains_key(*name);
        for name in old.chains.keys().filter(gone) {
            let _ = writeln!(
                text,
                "flush chain inet {0} {name}\ndelete chain inet {0} {name}",
                self.table
            );
        }
        let gone = |name: &&String| !new.sets.contains_key(*name);
        for name in old.sets.keys().filter(gone) {
            for family in FAMILIES {
                let _ = writeln!(
                    text,
                    "delete set inet {} {name}{}",
                    self.table, family.digit
                );
            }
        }
        Some(text)
    }

    fn add_set(&self, text: &mut String, name: &str) {
        for Family { digit, kind, .. } in FAMILIES {
            let _ = writeln!(
                text,
                "add set inet {} {name}{digit} {{ type {kind}; flags interval; }}",
                self.table
            );
        }
    }

    fn change_members(
        &self,
        text: &mut String,
        name: &str,
        old: &BTreeSet<AddressBlock>,
        new: &BTreeSet<AddressBlock>,
    ) {
        for (verb, members) in [
            ("delete", old.difference(new)),
            ("add", new.difference(old)),
        ] {
            let members: Vec<&AddressBlock> = members.collect();
            for family in FAMILIES {
                let own = members
                    .iter()
                    .filter(|block| block.is_ipv4() == family.is_four());
                let own: Vec<String> = own.map(ToString::to_string).collect();
                for some in own.chunks(MEMBERS_PER_COMMAND) {
                    let _ = writeln!(
                        text,
                        "{verb} element inet {} {name}{} {{ {} }}",
                        self.table,
                        family.digit,
                        some.join(", ")
                    );
                }
            }
        }
    }

    fn change_map(
        &self,
        text: &mut String,
        name: &str,
        old: &BTreeMap<IpAddr, String>,
        new: &BTreeMap<IpAddr, String>,
    ) {
        let without = |map: &BTreeMap<IpAddr, String>, other: &BTreeMap<IpAddr, String>| {
            let differs =
                |(address, chain): &(&IpAddr, &String)| other.get(*address) != Some(*chain);
            map.iter()
                .filter(differs)
                .map(|(address, chain)| (*address, format!("{address} : goto {chain}")))
                .collect::<Vec<_>>()
        };
        for (verb, entries) in [("delete", without(old, new)), ("add", without(new, old))] {
            for family in FAMILIES {
                let own: Vec<&str> = entries
                    .iter()
                    .filter(|(address, _)| address.is_ipv4() == family.is_four())
                    .map(|(_, entry)| entry.as_str())
                    .collect();
                for some in own.chunks(MEMBERS_PER_COMMAND) {
                    let _ = writeln!(
                        text,
                        "{verb} element inet {} {name}{} {{ {} }}",
                        self.table,
                        family.digit,
                        some.join(", ")
                    );
                }
            }
        }
    }

    fn add_chain(&self, text: &mut String, name: &str, chain: &Chain) {
        let _ = writeln!(text, "add chain inet {} {name}", self.table);
        for rule in &chain.rules {
            for words in rule_words(rule, chain.direction) {
                let _ = writeln!(text, "add rule inet {} {name} {words}return", self.table);
            }
        }
        let _ = writeln!(text, "add rule inet {} {name} drop", self.table);
    }
}

/// The matches of a rule: one per address family if its peers are a set.
fn rule_words(rule: &Rule, direction: Direction) -> Vec<String> {
    let side = match direction {
        Direction::Ingress => "saddr",
        Direction::Egress => "daddr",
    };
    let ports = rule.ports.map_or_else(String::new, |ports| {
        let protocol = ports.protocol.name();
        match (ports.first, ports.last) {
            (0, u16::MAX) => format!("meta l4proto {protocol} "),
            (first, last) if first == last => {
                format!("meta l4proto {protocol} ct original proto-dst {first} ")
            }
            (first, last) => {
                format!("meta l4proto {protocol} ct original proto-dst {first}-{last} ")
            }
        }
    });
    match &rule.peers {
        Peers::Anyone => vec![ports],
        Peers::In(set) => FAMILIES
            .map(|Family { word, digit, .. }| {
                format!("ct original {word} {side} @{set}{digit} {ports}")
            })
            .to_vec(),
    }
}

#[derive(Clone, Copy)]
struct Family {
    digit: char,
    word: &'static str,
    kind: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family {
        digit: '4',
        word: "ip",
        kind: "ipv4_addr",
    },
    Family {
        digit: '6',
        word: "ip6",
        kind: "ipv6_addr",
    },
];

impl Family {
    fn of(address: &IpAddr) -> Self {
        FAMILIES[usize::from(address.is_ipv6())]
    }

    fn of_block(block: &AddressBlock) -> Self {
        FAMILIES[usize::from(!block.is_ipv4())]
    }

    fn is_four(self) -> bool {
        self.digit == '4'
    }
}

/// Applies rules in one transaction. Blocks.
pub fn run(program: &Path, rules: &str) -> Result<(), FirewallError> {
    nft(program, &["-f", "-"], rules)
}

/// Creates the table before pods send traffic. Rules of an earlier run stay until they are replaced, because its pods are running.
/// Without such rules nothing passes. Blocks.
pub fn open(surroundings: &Surroundings) -> Result<(), FirewallError> {
    let listing = ["list", "table", "inet", &surroundings.table];
    if nft(&surroundings.program, &listing, "").is_ok() {
        return Ok(());
    }
    run(
        &surroundings.program,
        &surroundings.whole(&Rules::default()),
    )
}

/// Removes the table of a node. Blocks.
pub fn remove(program: &Path, table: &str) -> Result<(), FirewallError> {
    let rules = format!("add table inet {table}\ndelete table inet {table}\n");
    match run(program, &rules) {
        Err(FirewallError::Run(error)) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The path of a program that is configured by its name. Given a path, the standard library spawns it without a fork; to
/// search a changed `PATH` it would fork, which copies this process's page tables.
fn located(program: &Path) -> PathBuf {
    const DIRECTORIES: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    DIRECTORIES
        .iter()
        .map(|directory| Path::new(directory).join(program))
        .find(|path| path.is_file())
        .unwrap_or_else(|| program.to_owned())
}

fn nft(program: &Path, arguments: &[&str], input: &str) -> Result<(), FirewallError> {
    let mut child = Command::new(located(program))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(FirewallError::Run)?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that exits without reading its input explains why on its standard error.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(FirewallError::Run)?;
    if output.status.success() {
        Ok(())
    } else {
        let message = String::from_utf8_lossy(&output.stderr);
        Err(FirewallError::Refused(message.trim().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Ports, Protocol};

    fn surroundings() -> Surroundings {
        Surroundings {
            program: "nft".into(),
            table: "t".to_owned(),
            links: "as1".to_owned(),
            ranges: vec![
                "10.200.0.0/16".parse().unwrap(),
                "fd00:1::/64".parse().unwrap(),
            ],
            resolver: vec!["10.200.0.1".parse().unwrap()],
            local_users: None,
        }
    }

    fn rules(members: &[&str], pods: &[(&str, &str)]) -> Rules {
        let rule = Rule {
            peers: Peers::In("s".to_owned()),
            ports: Some(Ports {
                protocol: Protocol::Tcp,
                first: 80,
                last: 90,
            }),
        };
        let chain = Chain {
            direction: Direction::Egress,
            rules: vec![rule],
        };
        let pods = pods.iter();
        Rules {
            sets: BTreeMap::from([(
                "s".to_owned(),
                members.iter().map(|text| text.parse().unwrap()).collect(),
            )]),
            chains: BTreeMap::from([("c".to_owned(), chain)]),
            ingress: BTreeMap::new(),
            egress: pods
                .map(|(address, chain)| (address.parse().unwrap(), (*chain).to_owned()))
                .collect(),
        }
    }

    #[test]
    fn a_new_pod_only_adds_members_to_sets() {
        let old = rules(&["10.0.0.0/8"], &[("10.200.0.2", "c")]);
        let new = rules(
            &["10.0.0.0/8", "fd00::5/128"],
            &[("10.200.0.2", "c"), ("10.200.0.3", "c"), ("fd00::3", "c")],
        );
        let change = surroundings().change(&old, &new).unwrap();
        assert_eq!(
            change,
            "add element inet t s6 { fd00::5 }
add element inet t egress4 { 10.200.0.3 : goto c }
add element inet t egress6 { fd00::3 : goto c }
"
        );
        assert_eq!(surroundings().change(&new, &new), None);
    }

    #[test]
    fn unused_sets_and_chains_are_removed_after_the_rules_that_used_them() {
        let old = rules(&["10.0.0.0/8"], &[("10.200.0.2", "c")]);
        let change = surroundings().change(&old, &Rules::default()).unwrap();
        assert_eq!(
            change,
            "delete element inet t egress4 { 10.200.0.2 : goto c }
flush chain inet t c
delete chain inet t c
delete set inet t s4
delete set inet t s6
"
        );
    }

    #[test]
    fn only_the_named_users_of_the_machine_reach_pods() {
        let output = |users: Option<Vec<u32>>| {
            let whole = surroundings().reached_by(users).whole(&Rules::default());
            let skuid = whole.lines().find(|line| line.contains("skuid"));
            skuid.map(|line| line.trim().to_owned())
        };
        assert_eq!(output(None), None);
        assert_eq!(
            output(Some(vec![0, 1000])).as_deref(),
            Some(
                "oifname \"as1*\" ct direction original meta skuid != { 0, 1000 } reject with icmpx admin-prohibited"
            )
        );
    }

    #[test]
    fn a_chain_judges_the_connection_in_both_families_and_drops_the_rest() {
        let whole = surroundings().whole(&rules(&[], &[]));
        let added: Vec<&str> = whole
            .lines()
            .filter(|line| line.starts_with("add rule"))
            .collect();
        assert_eq!(
            added,
            [
                "add rule inet t c ct original ip daddr @s4 meta l4proto tcp ct original proto-dst 80-90 return",
                "add rule inet t c ct original ip6 daddr @s6 meta l4proto tcp ct original proto-dst 80-90 return",
                "add rule inet t c drop",
            ]
        );
        assert!(whole.starts_with("add table inet t\ndelete table inet t\n"));
        for needed in [
            "ct original ip saddr 10.200.0.0/16 drop",
            "ct original ip6 daddr fd00:1::/64 drop",
            "ip daddr 10.200.0.1 meta l4proto { tcp, udp } th dport 53 jump asked",
            "ip6 saddr fd00:1::/64 oifname != \"as1*\" masquerade",
            "iifname != \"lo\" iifname != \"as1*\" ip daddr 10.200.0.1 drop",
            "iifname \"as1*\" meta mark set meta mark | 0x10000000",
            "ip6 daddr fd00:1::/64 meta mark set meta mark | 0x10000000",
        ] {
            assert!(whole.contains(needed), "{needed} in {whole}");
        }
    }
}
