//! A packet filter on the node's end of each pod's link: classic BPF, attached as a `tc` filter.
//!
//! It drops packets with a source address that is not the pod's (spoofing) and packets to multicast groups. Programs that manage
//! firewalls do not remove it, as they may remove the nftables table. If no table can be used ([`Forwarding::Off`]), it lets the pod
//! only respond to the node and query its resolver: it drops TCP segments that open a connection, fragments, and packets to other
//! addresses. It is stateless.
//!
//! Pure except for [`attach`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures::StreamExt;
use rtnetlink::Handle;
use rtnetlink::packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::tc::{
    TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcMessage, TcOption,
};

use super::links::Forwarding;

const ETHERTYPE: u32 = 12;
const IPV4: u32 = 0x0800;
const IPV6: u32 = 0x86dd;
const ARP: u32 = 0x0806;
/// The offset of the network header.
const NETWORK: u32 = 14;
const IPV6_HEADER: u32 = 40;

const TCP: u32 = 6;
const UDP: u32 = 17;
const ICMP: u32 = 1;
const ICMPV6: u32 = 58;
const TCP_FLAGS: u32 = 13;
const DESTINATION_PORT: u32 = 2;
/// The flags ACK and RST: a segment with either does not open a connection.
const ACK_OR_RST: u32 = 0x10 | 0x04;
const DNS: u32 = 53;
/// ICMP types of responses and errors.
const ICMP_ANSWERS: [u32; 3] = [0, 3, 11];
const ICMPV6_ANSWERS: [u32; 4] = [1, 2, 3, 129];

// Operation codes of classic BPF, from `linux/filter.h`.
const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const LOAD_HALF_INDEXED: u16 = 0x48;
const LOAD_BYTE_INDEXED: u16 = 0x50;
const LOAD_INDEX_IPV4_HEADER: u16 = 0xb1;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const JUMP_BITS: u16 = 0x45;
const RETURN: u16 = 0x06;

/// The return values of a filter, from `linux/pkt_cls.h`.
const PASS: u32 = 0;
const DROP: u32 = 2;

const BPF_OPS_LEN: u16 = 4;
const BPF_OPS: u16 = 5;
const ALL_PROTOCOLS: u16 = 0x0003;

/// The addresses of both ends of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    pub pod: Ipv4Addr,
    pub node: Ipv4Addr,
    /// The IPv6 addresses of the pod and the node.
    pub six: Option<(Ipv6Addr, Ipv6Addr)>,
}

/// `struct sock_filter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Instruction {
    code: u16,
    then: u8,
    otherwise: u8,
    value: u32,
}

/// The verdict on a packet.
#[derive(Debug, Clone, Copy)]
enum Verdict {
    Drop,
    Pass,
}

/// A program under construction. Each verdict is a return right after its test, because jumps of classic BPF are short.
#[derive(Debug, Default)]
struct Program(Vec<Instruction>);

impl Program {
    fn push(&mut self, code: u16, value: u32) {
        self.0.push(Instruction {
            code,
            then: 0,
            otherwise: 0,
            value,
        });
    }

    fn verdict(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Drop => self.push(RETURN, DROP),
            Verdict::Pass => self.push(RETURN, PASS),
        }
    }

    /// Returns a verdict if the test holds.
    fn when(&mut self, code: u16, value: u32, verdict: Verdict) {
        self.0.push(Instruction {
            code,
            then: 0,
            otherwise: 1,
            value,
        });
        self.verdict(verdict);
    }

    /// Drops the packet if the loaded value differs.
    fn require(&mut self, value: u32) {
        self.0.push(Instruction {
            code: JUMP_EQUAL,
            then: 1,
            otherwise: 0,
            value,
        });
        self.verdict(Verdict::Drop);
    }

    fn require_address(&mut self, offset: u32, address: IpAddr) {
        let bytes = match address {
            IpAddr::V4(address) => address.octets().to_vec(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        for (number, word) in (0..).zip(bytes.chunks(4)) {
            let word = word
                .iter()
                .fold(0, |word, byte| word << 8 | u32::from(*byte));
            self.push(LOAD_WORD, offset + 4 * number);
            self.require(word);
        }
    }

    /// Runs `block` if the loaded value is equal, and the rest otherwise. A block ends with a verdict.
    fn block(&mut self, value: u32, block: Program) {
        self.0.push(Instruction {
            code: JUMP_EQUAL,
            then: 0,
            otherwise: u8::try_from(block.0.len()).unwrap_or(u8::MAX),
            value,
        });
        self.0.extend(block.0);
    }
}

/// The filter of one link. Pure.
fn program(ends: &Ends, forwarding: Forwarding) -> Vec<Instruction> {
    let mut program = Program::default();
    program.push(LOAD_HALF, ETHERTYPE);
    program.when(JUMP_EQUAL, ARP, Verdict::Pass);
    program.block(IPV4, ipv4(ends, forwarding));
    if let Some((pod, node)) = ends.six {
        program.block(IPV6, ipv6(pod, node, forwarding));
    }
    program.verdict(Verdict::Drop);
    program.0
}

fn ipv4(ends: &Ends, forwarding: Forwarding) -> Program {
    const FIRST_MULTICAST: u32 = 0xe000_0000;
    const FRAGMENT_BITS: u32 = 0x3fff;
    let mut program = Program::default();
    program.require_address(NETWORK + 12, ends.pod.into());
    if forwarding == Forwarding::On {
        program.push(LOAD_WORD, NETWORK + 16);
        program.when(JUMP_AT_LEAST, FIRST_MULTICAST, Verdict::Drop);
        program.verdict(Verdict::Pass);
        return program;
    }
    program.require_address(NETWORK + 16, ends.node.into());
    program.push(LOAD_HALF, NETWORK + 6);
    program.when(JUMP_BITS, FRAGMENT_BITS, Verdict::Drop);
    program.push(LOAD_INDEX_IPV4_HEADER, NETWORK);
    program.push(LOAD_BYTE, NETWORK + 9);
    let indexed = Transport {
        half: LOAD_HALF_INDEXED,
        byte: LOAD_BYTE_INDEXED,
        offset: NETWORK,
    };
    program.block(TCP, indexed.tcp());
    program.block(UDP, indexed.udp());
    program.block(ICMP, indexed.icmp(&ICMP_ANSWERS));
    program.verdict(Verdict::Drop);
    program
}

fn ipv6(pod: Ipv6Addr, node: Ipv6Addr, forwarding: Forwarding) -> Program {
    const MULTICAST: u32 = 0xff;
    let mut program = Program::default();
    program.require_address(NETWORK + 8, pod.into());
    if forwarding == Forwarding::On {
        program.push(LOAD_BYTE, NETWORK + 24);
        program.when(JUMP_EQUAL, MULTICAST, Verdict::Drop);
        program.verdict(Verdict::Pass);
        return program;
    }
    program.require_address(NETWORK + 24, node.into());
    // Packets with extension headers, such as fragments, are dropped.
    program.push(LOAD_BYTE, NETWORK + 6);
    let fixed = Transport {
        half: LOAD_HALF,
        byte: LOAD_BYTE,
        offset: NETWORK + IPV6_HEADER,
    };
    program.block(TCP, fixed.tcp());
    program.block(UDP, fixed.udp());
    program.block(ICMPV6, fixed.icmp(&ICMPV6_ANSWERS));
    program.verdict(Verdict::Drop);
    program
}

/// How to read the transport header.
#[derive(Debug, Clone, Copy)]
struct Transport {
    half: u16,
    byte: u16,
    offset: u32,
}

impl Transport {
    fn tcp(self) -> Program {
        let mut program = Program::default();
        program.push(self.byte, self.offset + TCP_FLAGS);
        program.when(JUMP_BITS, ACK_OR_RST, Verdict::Pass);
        program.0.extend(self.udp().0);
        program
    }

    fn udp(self) -> Program {
        let mut program = Program::default();
        program.push(self.half, self.offset + DESTINATION_PORT);
        program.when(JUMP_EQUAL, DNS, Verdict::Pass);
        program.verdict(Verdict::Drop);
        program
    }

    fn icmp(self, answers: &[u32]) -> Program {
        let mut program = Program::default();
        program.push(self.byte, self.offset);
        for answer in answers {
            program.when(JUMP_EQUAL, *answer, Verdict::Pass);
        }
        program.verdict(Verdict::Drop);
        program
    }
}

/// Attaches the filter to a new link.
pub async fn attach(
    handle: &Handle,
    link: u32,
    ends: &Ends,
    forwarding: Forwarding,
) -> Result<(), rtnetlink::Error> {
    let link = i32::try_from(link).unwrap_or_default();
    handle.qdisc().add(link).ingress().execute().await?;
    let instructions = program(ends, forwarding);
    let count = u16::try_from(instructions.len()).unwrap_or(u16::MAX);
    let code = instructions.iter().flat_map(|instruction| {
        let [low, high] = instruction.code.to_ne_bytes();
        let jumps = [low, high, instruction.then, instruction.otherwise];
        jumps.into_iter().chain(instruction.value.to_ne_bytes())
    });
    let options = [
        TcFilterBpfOption::Other(DefaultNla::new(BPF_OPS_LEN, count.to_ne_bytes().to_vec())),
        TcFilterBpfOption::Other(DefaultNla::new(BPF_OPS, code.collect())),
        TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
    ];
    let mut message = TcMessage::with_index(link);
    message.header.parent = TcHandle {
        major: 0xffff,
        minor: TcHandle::MIN_INGRESS,
    };
    message.header.info = u32::from(TcHandle {
        major: 1,
        minor: ALL_PROTOCOLS.to_be(),
    });
    message.attributes = vec![
        TcAttribute::Kind(TcFilterBpf::KIND.to_owned()),
        TcAttribute::Options(options.map(TcOption::Bpf).to_vec()),
    ];
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::NewTrafficFilter(message));
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL;
    let mut handle = handle.clone();
    let mut answers = handle.request(request)?;
    while let Some(answer) = answers.next().await {
        if let NetlinkPayload::Error(error) = answer.payload
            && error.code.is_some()
        {
            return Err(rtnetlink::Error::NetlinkError(error));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 2);
    const NODE: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
    const POD6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
    const NODE6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);

    /// Interprets a program as the kernel does.
    fn run(program: &[Instruction], packet: &[u8]) -> u32 {
        let load = |at: usize, size: usize| {
            let bytes = packet.get(at..at + size)?;
            Some(
                bytes
                    .iter()
                    .fold(0, |value, byte| value << 8 | u32::from(*byte)),
            )
        };
        let (mut accumulator, mut index, mut at) = (0, 0, 0);
        loop {
            let Instruction {
                code,
                then,
                otherwise,
                value,
            } = program[at];
            at += 1;
            let place = value as usize;
            let jump = |holds: bool| usize::from(if holds { then } else { otherwise });
            let loaded = match code {
                LOAD_WORD => load(place, 4),
                LOAD_HALF => load(place, 2),
                LOAD_BYTE => load(place, 1),
                LOAD_HALF_INDEXED => load(place + index, 2),
                LOAD_BYTE_INDEXED => load(place + index, 1),
                LOAD_INDEX_IPV4_HEADER => {
                    index = load(place, 1).map_or(0, |byte| (byte as usize & 0xf) * 4);
                    Some(accumulator)
                }
                JUMP_EQUAL => {
                    at += jump(accumulator == value);
                    Some(accumulator)
                }
                JUMP_AT_LEAST => {
                    at += jump(accumulator >= value);
                    Some(accumulator)
                }
                JUMP_BITS => {
                    at += jump(accumulator & value != 0);
                    Some(accumulator)
                }
                RETURN => return value,
                other => panic!("{other:#x} is not used"),
            };
            match loaded {
                Some(value) => accumulator = value,
                None => return 0,
            }
        }
    }

    fn frame(ethertype: u32, network: Vec<u8>) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend(u16::try_from(ethertype).unwrap().to_be_bytes());
        frame.extend(network);
        frame
    }

    fn packet(from: IpAddr, to: IpAddr, protocol: u32, transport: &[u8]) -> Vec<u8> {
        let protocol = u8::try_from(protocol).unwrap();
        let (mut header, ethertype) = match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                // With options, so that the transport header has another offset than usual.
                let mut header = vec![0x46, 0, 0, 0, 0, 0, 0x40, 0, 64, protocol, 0, 0];
                header.extend(from.octets());
                header.extend(to.octets());
                header.extend([0; 4]);
                (header, IPV4)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let mut header = vec![0x60, 0, 0, 0, 0, 0, protocol, 64];
                header.extend(from.octets());
                header.extend(to.octets());
                (header, IPV6)
            }
            _ => panic!("one family"),
        };
        header.extend(transport);
        frame(ethertype, header)
    }

    fn tcp(port: u16, flags: u8) -> Vec<u8> {
        let mut header = vec![0; 20];
        header[2..4].copy_from_slice(&port.to_be_bytes());
        header[13] = flags;
        header
    }

    fn passes(forwarding: Forwarding, packet: &[u8]) -> bool {
        let ends = Ends {
            pod: POD,
            node: NODE,
            six: Some((POD6, NODE6)),
        };
        run(&program(&ends, forwarding), packet) == PASS
    }

    const SYN: u8 = 0x02;
    const ACK: u8 = 0x10;

    #[test]
    fn packets_with_forged_source_addresses_are_dropped() {
        for (from, to, expected) in [
            (POD.into(), "203.0.113.1".parse().unwrap(), true),
            (POD.into(), IpAddr::from(NODE), true),
            (NODE.into(), "203.0.113.1".parse().unwrap(), false),
            ("10.200.0.3".parse().unwrap(), NODE.into(), false),
            ("127.0.0.1".parse().unwrap(), NODE.into(), false),
            (POD.into(), "224.0.0.251".parse().unwrap(), false),
            (POD.into(), "255.255.255.255".parse().unwrap(), false),
            (POD6.into(), "2001:db8::1".parse().unwrap(), true),
            (NODE6.into(), "2001:db8::1".parse().unwrap(), false),
            ("fd00::3".parse().unwrap(), NODE6.into(), false),
            ("fd00::2:2".parse().unwrap(), NODE6.into(), false),
            ("fe80::2".parse().unwrap(), NODE6.into(), false),
            (POD6.into(), "ff02::fb".parse().unwrap(), false),
        ] {
            let packet = packet(from, to, TCP, &tcp(80, SYN));
            assert_eq!(passes(Forwarding::On, &packet), expected, "{from} to {to}");
        }
        assert!(passes(Forwarding::On, &frame(ARP, vec![0; 28])));
        assert!(!passes(Forwarding::On, &frame(0x8847, vec![0; 40])));
    }

    #[test]
    fn without_a_table_a_pod_only_responds_to_the_node_and_queries_dns() {
        let reset = 0x04;
        for (pod, node, elsewhere, icmp, answer, request) in [
            (
                IpAddr::from(POD),
                IpAddr::from(NODE),
                "203.0.113.1",
                ICMP,
                0,
                8,
            ),
            (POD6.into(), NODE6.into(), "2001:db8::1", ICMPV6, 129, 128),
        ] {
            let elsewhere: IpAddr = elsewhere.parse().unwrap();
            for (case, packet, expected) in [
                (
                    "answers",
                    packet(pod, node, TCP, &tcp(40000, SYN | ACK)),
                    true,
                ),
                ("sends on", packet(pod, node, TCP, &tcp(40000, ACK)), true),
                ("refuses", packet(pod, node, TCP, &tcp(40000, reset)), true),
                ("opens", packet(pod, node, TCP, &tcp(8080, SYN)), false),
                ("no flags", packet(pod, node, TCP, &tcp(8080, 0)), false),
                ("asks by TCP", packet(pod, node, TCP, &tcp(53, SYN)), true),
                ("asks", packet(pod, node, UDP, &tcp(53, 0)), true),
                ("datagram", packet(pod, node, UDP, &tcp(5353, ACK)), false),
                ("SCTP", packet(pod, node, 132, &tcp(53, ACK)), false),
                ("pong", packet(pod, node, icmp, &[answer, 0, 0, 0]), true),
                ("ping", packet(pod, node, icmp, &[request, 0, 0, 0]), false),
                (
                    "elsewhere",
                    packet(pod, elsewhere, TCP, &tcp(80, ACK)),
                    false,
                ),
                ("forged", packet(elsewhere, node, TCP, &tcp(80, ACK)), false),
            ] {
                assert_eq!(passes(Forwarding::Off, &packet), expected, "{pod} {case}");
            }
        }
    }

    #[test]
    fn a_fragment_cannot_hide_that_it_opens_a_connection() {
        for (flags, expected) in [(0x4000_u16, true), (0x2000, false), (0x0001, false)] {
            let mut packet = packet(POD.into(), NODE.into(), TCP, &tcp(40000, ACK));
            packet[20..22].copy_from_slice(&flags.to_be_bytes());
            assert_eq!(passes(Forwarding::Off, &packet), expected, "{flags:#x}");
        }
        let extended = packet(POD6.into(), NODE6.into(), 44, &tcp(40000, ACK));
        assert!(!passes(Forwarding::Off, &extended));
    }
}
