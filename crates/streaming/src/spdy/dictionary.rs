//! The preset zlib dictionary of SPDY/3 header blocks: a constant of the protocol that must be the same on both sides.

use std::sync::LazyLock;

/// The identifier of the dictionary in a zlib stream: the Adler-32 checksum of [`DICTIONARY`].
pub const DICTIONARY_ID: u32 = 0xe3c6_a7c2;

/// The words that the dictionary stores with a length prefix, as in a header block.
const COUNTED: [&str; 65] = [
    "options",
    "head",
    "post",
    "put",
    "delete",
    "trace",
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "accept-ranges",
    "age",
    "allow",
    "authorization",
    "cache-control",
    "connection",
    "content-base",
    "content-encoding",
    "content-language",
    "content-length",
    "content-location",
    "content-md5",
    "content-range",
    "content-type",
    "date",
    "etag",
    "expect",
    "expires",
    "from",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "last-modified",
    "location",
    "max-forwards",
    "pragma",
    "proxy-authenticate",
    "proxy-authorization",
    "range",
    "referer",
    "retry-after",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "vary",
    "via",
    "warning",
    "www-authenticate",
    "method",
    "get",
    "status",
    "200 OK",
    "version",
    "HTTP/1.1",
    "url",
    "public",
    "set-cookie",
    "keep-alive",
    "origin",
];

/// The rest of the dictionary, without length prefixes.
const PLAIN: &str = "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505\
203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden\
404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable\
Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT\
chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,public\
privatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.";

pub static DICTIONARY: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut dictionary = Vec::with_capacity(1_423);
    for word in COUNTED {
        let length = u32::try_from(word.len()).expect("the words are shorter than 4 GiB");
        dictionary.extend_from_slice(&length.to_be_bytes());
        dictionary.extend_from_slice(word.as_bytes());
    }
    dictionary.extend_from_slice(PLAIN.as_bytes());
    dictionary
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dictionary_has_the_checksum_of_the_protocol() {
        let (mut low, mut high) = (1_u32, 0_u32);
        for byte in DICTIONARY.iter() {
            low = (low + u32::from(*byte)) % 65_521;
            high = (high + low) % 65_521;
        }
        assert_eq!(DICTIONARY.len(), 1_423);
        assert_eq!(high << 16 | low, DICTIONARY_ID);
    }
}
