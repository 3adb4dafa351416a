//! The namespace of a forwarded connection, in a PROXY protocol header (version 2).
//!
//! The node forwards ports of mirror pods to services of the machine, the router among them. An account that may forward ports in one namespace must not reach
//! sandboxes of another by that, so the node says which namespace the mirror pod is in before anything else passes. The header is `LOCAL` (the node itself
//! connects) and carries the namespace in a custom field.
//!
//! A header takes rights away and gives none: a client that forges one narrows what it may do.

/// How every header of version 2 begins.
pub const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// The signature, version and command, address family, and the length of what follows.
pub const FIXED_LENGTH: usize = 16;

/// Version 2, command LOCAL.
const LOCAL: u8 = 0x20;
const UNSPECIFIED_FAMILY: u8 = 0;
/// The first type that is left to applications.
const NAMESPACE_TYPE: u8 = 0xe0;
/// Type and length of a field.
const FIELD_HEAD: usize = 3;

/// A header for a connection on behalf of this namespace.
pub fn encode(namespace: &str) -> Vec<u8> {
    // Names of namespaces have at most 63 characters.
    let name = &namespace.as_bytes()[..namespace.len().min(63)];
    let length = u8::try_from(name.len()).unwrap_or_default();
    let mut header = SIGNATURE.to_vec();
    header.extend([LOCAL, UNSPECIFIED_FAMILY, 0, length + 3]);
    header.extend([NAMESPACE_TYPE, 0, length]);
    header.extend(name);
    header
}

/// How much follows the fixed part of a header. `None` if it is not one of [`encode`]'s kind.
pub fn rest_length(fixed: &[u8; FIXED_LENGTH]) -> Option<usize> {
    let is_local = fixed.starts_with(SIGNATURE) && fixed[12] == LOCAL;
    is_local.then(|| usize::from(u16::from_be_bytes([fixed[14], fixed[15]])))
}

/// The namespace that the rest of a header names.
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
    fn a_namespace_is_read_as_it_was_written() {
        let header = encode("team-a");
        let (fixed, rest) = header.split_first_chunk::<FIXED_LENGTH>().unwrap();
        assert_eq!(rest_length(fixed), Some(rest.len()));
        assert_eq!(namespace(rest), Some("team-a"));
    }

    #[test]
    fn what_is_no_such_header_names_no_namespace() {
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
