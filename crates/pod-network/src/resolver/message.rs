//! Parses and writes DNS messages, as far as cluster DNS needs them: one question in, records of a few types out. Pure.

use std::net::{Ipv4Addr, Ipv6Addr};

const HEADER: usize = 12;
/// The maximum UDP response of a client without EDNS.
const PLAIN_LIMIT: usize = 512;
/// The maximum UDP response that is sent, to avoid fragmentation.
const OWN_LIMIT: usize = 1232;
/// A compression pointer to the name in the question.
const QUESTION_NAME: [u8; 2] = [0xc0, 0x0c];
/// The TTL of records. Short, because pods come and go.
const SECONDS_TO_LIVE: u32 = 5;
const LONGEST_NAME: usize = 253;

pub const TYPE_A: u16 = 1;
const TYPE_CNAME: u16 = 5;
pub const TYPE_AAAA: u16 = 28;
pub const TYPE_SRV: u16 = 33;
const TYPE_OPT: u16 = 41;
pub const TYPE_ANY: u16 = 255;
const CLASS_INTERNET: u16 = 1;

/// A packet that is not a valid query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Too short for an error response, or itself a response.
    #[error("not a question")]
    NotAQuestion,
    #[error("a question that cannot be read")]
    Unreadable,
}

/// A query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    pub id: u16,
    /// In lower case, without the trailing dot. Absent if it is not UTF-8.
    pub name: Option<String>,
    pub kind: u16,
    /// The bytes of the question, which the response repeats.
    raw: Vec<u8>,
    recursion_desired: bool,
    /// The client's maximum UDP response, from EDNS.
    announced_limit: Option<usize>,
    internet: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    A(Ipv4Addr),
    Aaaa(Ipv6Addr),
    Cname(String),
    Srv { port: u16, target: String },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    Fine = 0,
    FormatError = 1,
    ServerFailure = 2,
    NoSuchName = 3,
}

/// The transport of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Udp,
    Tcp,
}

fn number(packet: &[u8], at: usize) -> Option<u16> {
    let bytes = packet.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

impl Question {
    pub fn parse(packet: &[u8]) -> Result<Self, Malformed> {
        let (Some(id), Some(flags)) = (number(packet, 0), number(packet, 2)) else {
            return Err(Malformed::NotAQuestion);
        };
        if packet.len() < HEADER || flags & 0x8000 != 0 {
            return Err(Malformed::NotAQuestion);
        }
        let counts = [4, 6, 8, 10].map(|at| number(packet, at).unwrap_or(0));
        // Only standard queries with one question, as all resolvers send them.
        if flags & 0x7800 != 0 || counts[0] != 1 || counts[1] != 0 || counts[2] != 0 {
            return Err(Malformed::Unreadable);
        }
        let (name, after) = read_name(packet, HEADER)?;
        let kind = number(packet, after).ok_or(Malformed::Unreadable)?;
        let class = number(packet, after + 2).ok_or(Malformed::Unreadable)?;
        let end = after + 4;
        Ok(Self {
            id,
            name,
            kind,
            raw: packet[HEADER..end].to_vec(),
            recursion_desired: flags & 0x0100 != 0,
            announced_limit: announced_limit(packet, end, counts[3]),
            internet: class == CLASS_INTERNET,
        })
    }

    /// Whether the query has class IN.
    pub fn is_for_internet(&self) -> bool {
        self.internet
    }

    /// Writes the response to this query.
    pub fn answer(&self, code: Code, records: &[Record], transport: Transport) -> Vec<u8> {
        let limit = match transport {
            Transport::Tcp => usize::from(u16::MAX),
            Transport::Udp => self
                .announced_limit
                .map_or(PLAIN_LIMIT, |limit| limit.clamp(PLAIN_LIMIT, OWN_LIMIT)),
        };
        let whole = self.write(code, records, false);
        if whole.len() <= limit {
            return whole;
        }
        // The truncation flag makes the client repeat the query over TCP.
        self.write(code, &[], true)
    }

    fn write(&self, code: Code, records: &[Record], truncated: bool) -> Vec<u8> {
        const ANSWER_AUTHORITATIVE_RECURSIVE: u16 = 0x8480;
        let mut flags = ANSWER_AUTHORITATIVE_RECURSIVE | code as u16;
        if self.recursion_desired {
            flags |= 0x0100;
        }
        if truncated {
            flags |= 0x0200;
        }
        let extended = u16::from(self.announced_limit.is_some());
        let count = u16::try_from(records.len()).unwrap_or(u16::MAX);
        let mut packet = Vec::with_capacity(512);
        for value in [self.id, flags, 1, count, 0, extended] {
            packet.extend(value.to_be_bytes());
        }
        packet.extend(&self.raw);
        for record in records.iter().take(usize::from(count)) {
            write_record(&mut packet, record);
        }
        if extended == 1 {
            let limit = u16::try_from(OWN_LIMIT).unwrap_or(u16::MAX);
            packet.push(0);
            packet.extend(TYPE_OPT.to_be_bytes());
            packet.extend(limit.to_be_bytes());
            packet.extend([0; 6]);
        }
        packet
    }
}

/// The error response (FORMERR) to an invalid query. `None` if the packet is too short to have an ID.
pub fn complaint(packet: &[u8]) -> Option<Vec<u8>> {
    const ANSWER: u16 = 0x8000;
    let id = number(packet, 0)?;
    let mut answer = Vec::with_capacity(HEADER);
    for value in [id, ANSWER | Code::FormatError as u16, 0, 0, 0, 0] {
        answer.extend(value.to_be_bytes());
    }
    Some(answer)
}

/// Parses a name. Returns the name and the offset of its end.
fn read_name(packet: &[u8], start: usize) -> Result<(Option<String>, usize), Malformed> {
    const LONGEST_LABEL: usize = 63;
    let mut at = start;
    let mut name = String::new();
    let mut is_text = true;
    loop {
        let length = usize::from(*packet.get(at).ok_or(Malformed::Unreadable)?);
        at += 1;
        if length == 0 {
            break;
        }
        // The question comes first, so a compression pointer has nothing to point to.
        if length > LONGEST_LABEL {
            return Err(Malformed::Unreadable);
        }
        let label = packet.get(at..at + length).ok_or(Malformed::Unreadable)?;
        at += length;
        if at - start > LONGEST_NAME + 1 {
            return Err(Malformed::Unreadable);
        }
        is_text &= label
            .iter()
            .all(|byte| byte.is_ascii_graphic() && *byte != b'.');
        if !name.is_empty() {
            name.push('.');
        }
        name.extend(
            label
                .iter()
                .map(|byte| char::from(byte.to_ascii_lowercase())),
        );
    }
    Ok((is_text.then_some(name), at))
}

/// The client's maximum UDP response, from the OPT record (EDNS).
fn announced_limit(packet: &[u8], end: usize, additional: u16) -> Option<usize> {
    if additional == 0 || *packet.get(end)? != 0 || number(packet, end + 1)? != TYPE_OPT {
        return None;
    }
    Some(usize::from(number(packet, end + 3)?))
}

fn write_name(packet: &mut Vec<u8>, name: &str) {
    for label in name.split('.').filter(|label| !label.is_empty()) {
        let label = &label.as_bytes()[..label.len().min(63)];
        packet.push(u8::try_from(label.len()).unwrap_or(0));
        packet.extend(label);
    }
    packet.push(0);
}

fn write_record(packet: &mut Vec<u8>, record: &Record) {
    let (kind, data) = match record {
        Record::A(address) => (TYPE_A, address.octets().to_vec()),
        Record::Aaaa(address) => (TYPE_AAAA, address.octets().to_vec()),
        Record::Cname(target) => {
            let mut data = Vec::new();
            write_name(&mut data, target);
            (TYPE_CNAME, data)
        }
        Record::Srv { port, target } => {
            const ALL_ALIKE: [u8; 4] = [0, 0, 0, 100];
            let mut data = ALL_ALIKE.to_vec();
            data.extend(port.to_be_bytes());
            write_name(&mut data, target);
            (TYPE_SRV, data)
        }
    };
    packet.extend(QUESTION_NAME);
    packet.extend(kind.to_be_bytes());
    packet.extend(CLASS_INTERNET.to_be_bytes());
    packet.extend(SECONDS_TO_LIVE.to_be_bytes());
    packet.extend(u16::try_from(data.len()).unwrap_or(0).to_be_bytes());
    packet.extend(data);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A query as resolvers send it.
    fn packet(name: &str, kind: u16, limit: Option<u16>) -> Vec<u8> {
        let extended = u16::from(limit.is_some());
        let mut packet = Vec::new();
        for value in [0x1234, 0x0100, 1, 0, 0, extended] {
            packet.extend(u16::to_be_bytes(value));
        }
        write_name(&mut packet, name);
        packet.extend(kind.to_be_bytes());
        packet.extend(CLASS_INTERNET.to_be_bytes());
        if let Some(limit) = limit {
            packet.push(0);
            packet.extend(TYPE_OPT.to_be_bytes());
            packet.extend(limit.to_be_bytes());
            packet.extend([0; 6]);
        }
        packet
    }

    #[test]
    fn a_response_repeats_the_question_exactly() {
        let question = Question::parse(&packet("Web.N.svc.cluster.local", TYPE_A, None)).unwrap();
        assert_eq!(question.name.as_deref(), Some("web.n.svc.cluster.local"));
        assert_eq!(question.kind, TYPE_A);
        let answer = question.answer(
            Code::Fine,
            &[Record::A(Ipv4Addr::new(10, 1, 2, 3))],
            Transport::Udp,
        );
        assert_eq!(answer[..4], [0x12, 0x34, 0x85, 0x80]);
        assert_eq!(answer[4..12], [0, 1, 0, 1, 0, 0, 0, 0]);
        // With the same case: some clients vary it against spoofing (DNS 0x20).
        assert_eq!(&answer[12..16], b"\x03Web");
        assert_eq!(answer[answer.len() - 6..], [0, 4, 10, 1, 2, 3]);
    }

    #[test]
    fn a_response_that_does_not_fit_is_truncated_for_a_retry_over_tcp() {
        let records = vec![Record::A(Ipv4Addr::new(10, 1, 2, 3)); 60];
        for (limit, fits) in [(None, false), (Some(900), false), (Some(4096), true)] {
            let question = Question::parse(&packet("a.b", TYPE_A, limit)).unwrap();
            let answer = question.answer(Code::Fine, &records, Transport::Udp);
            assert_eq!(answer[2] & 2 == 0, fits, "{limit:?}");
            assert!(answer.len() <= OWN_LIMIT);
            let answer = question.answer(Code::Fine, &records, Transport::Tcp);
            assert_eq!((answer[2] & 2, answer[7]), (0, 60));
        }
    }

    #[test]
    fn only_malformed_queries_get_an_error_response() {
        assert_eq!(Question::parse(&[0; 3]), Err(Malformed::NotAQuestion));
        let mut answer = packet("a", TYPE_A, None);
        answer[2] |= 0x80;
        assert_eq!(Question::parse(&answer), Err(Malformed::NotAQuestion));
        let mut pointer = packet("a", TYPE_A, None);
        pointer[12] = 0xc0;
        assert_eq!(Question::parse(&pointer), Err(Malformed::Unreadable));
        let short = &packet("abc", TYPE_A, None)[..15];
        assert_eq!(Question::parse(short), Err(Malformed::Unreadable));
        let mut two = packet("a", TYPE_A, None);
        two[5] = 2;
        assert_eq!(Question::parse(&two), Err(Malformed::Unreadable));
        assert_eq!(complaint(&two).unwrap()[3], 1);
        let mut bytes = packet("a", TYPE_A, None);
        bytes[13] = 0xff;
        assert_eq!(Question::parse(&bytes).unwrap().name, None);
    }

    proptest! {
        #[test]
        fn nothing_that_arrives_breaks_it(bytes in proptest::collection::vec(any::<u8>(), 0..600), cut in 0_usize..40) {
            let _ = Question::parse(&bytes).map(|question| question.answer(Code::Fine, &[], Transport::Udp));
            let _ = complaint(&bytes);
            let mut real = packet("web.n.svc.cluster.local", TYPE_SRV, Some(1232));
            for (at, byte) in bytes.iter().take(3).enumerate() {
                let index = (usize::from(*byte) * 7 + at) % real.len();
                real[index] ^= byte;
            }
            real.truncate(real.len().saturating_sub(cut));
            if let Ok(question) = Question::parse(&real) {
                prop_assert!(question.answer(Code::NoSuchName, &[], Transport::Udp).len() <= OWN_LIMIT);
            }
        }
    }
}
