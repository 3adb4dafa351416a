//! A PROXY protocol header (version 2) that carries the namespace of a forwarded connection.
//!
//! The node forwards ports of mirror pods to services of the machine, including the router. A user who may forward ports in one
//! namespace must not reach sandboxes of another namespace through it. So the node sends the namespace of the mirror pod before
//! any other data. The header's command is `LOCAL` (the node itself connects), and a custom TLV field holds the namespace.
//!
//! The header can only reduce permissions: a client that forges one restricts itself.

/// The first bytes of every version 2 header.
pub const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// The length of signature, version and command, address family, and the length field.
pub const FIXED_LENGTH: usize = 16;

/// Version 2, command LOCAL.
const LOCAL: u8 = 0x20;
const UNSPECIFIED_FAMILY: u8 = 0;
/// The first TLV type that is reserved for applications.
const NAMESPACE_TYPE: u8 = 0xe0;
/// The length of the type and length of a TLV field.
const FIELD_HEAD: usize = 3;

/// Encodes a header for a connection on behalf of this namespace.
pub fn encode(namespace: &str) -> Vec<u8> {
    // The length fits: a namespace name has at most 63 characters.
    let name = &namespace.as_bytes()[..namespace.len().min(63)];
    let length = u8::try_from(name.len()).unwrap_or_default();
    let mut header = SIGNATURE.to_vec();
    header.extend([LOCAL, UNSPECIFIED_FAMILY, 0, length + 3]);
    header.extend([NAMESPACE_TYPE, 0, length]);
    header.extend(name);
    header
}

/// The length of the rest of a header. `None` if the header is not one that [`encode`] creates.
pub fn rest_length(fixed: &[u8; FIXED_LENGTH]) -> Option<usize> {
    let is_local = fixed.starts_with(SIGNATURE) && fixed[12] == LOCAL;
    is_local.then(|| usize::from(u16::from_be_bytes([fixed[14], fixed[15]])))
}

/// The namespace in the rest of a header.
pub fn namespace(mut rest: &[u8]) -> Option<&str> {
    loop {
        let (head, after) = rest.split_at_checked(FIELD_HEAD)?;
        let length = usize::from(u16::from_be_bytes([head[1], head[2]]));
        let (value, after) = after.split_at_checked(length)?;
        if head[0] == NAMESPACE_TYPE {
            return std::str::from_utf8(value)
                .ok()
                .filter(|name| !name.is_empty());
        }
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_round_trips() {
        let header = encode("team-a");
        let (fixed, rest) = header.split_first_chunk::<FIXED_LENGTH>().unwrap();
        assert_eq!(rest_length(fixed), Some(rest.len()));
        assert_eq!(namespace(rest), Some("team-a"));
    }

    #[test]
    fn other_headers_give_no_namespace() {
        assert_eq!(rest_length(b"GET / HTTP/1.1\r\n"), None);
        for rest in [
            &b""[..],
            b"\xe0",
            b"\xe0\0\0",
            b"\xe0\0\x05abc",
            b"\x04\0\x01x",
        ] {
            assert_eq!(namespace(rest), None, "{rest:?}");
        }
        assert_eq!(namespace(b"\x04\0\x01x\xe0\0\x01a"), Some("a"));
    }
}
