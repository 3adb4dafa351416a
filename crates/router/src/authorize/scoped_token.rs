//! Scoped tokens: they permit some ports of one sandbox until an expiry time. Compact JSON web tokens, signed with a shared
//! secret (HS256) or with Ed25519 (EdDSA). The key decides the algorithm; the token's header must only match it.
//!
//! ```text
//! {"ns": "default", "sandbox": "abc", "ports": [8888], "exp": 1767225600}
//! ```

use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

/// A shorter secret could be guessed.
const SHORTEST_SECRET: usize = 32;
/// The bytes before the 32 bytes of an Ed25519 public key in its standard encoding (RFC 8410).
const PUBLIC_KEY_PREFIX: [u8; 12] = [
    0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00,
];

/// The sandbox, ports and expiry time of a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scope {
    #[serde(rename = "ns")]
    pub namespace: String,
    pub sandbox: String,
    /// At least one.
    pub ports: Vec<u16>,
    /// Seconds since the Unix epoch.
    #[serde(rename = "exp")]
    pub expires: u64,
}

impl Scope {
    /// A scope that ends `lifetime` after `now`.
    pub fn new(
        namespace: &str,
        sandbox: &str,
        ports: &[u16],
        now: SystemTime,
        lifetime: Duration,
    ) -> Self {
        let expires = seconds_since_epoch(now).saturating_add(lifetime.as_secs());
        Self {
            namespace: namespace.to_owned(),
            sandbox: sandbox.to_owned(),
            ports: ports.to_vec(),
            expires,
        }
    }

    pub fn permits(&self, namespace: &str, sandbox: &str, port: u16) -> bool {
        self.namespace == namespace && self.sandbox == sandbox && self.ports.contains(&port)
    }
}

/// What a verified token permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    /// The ports in the scope.
    Ports(Scope),
    /// Every port of a sandbox. Tokens that upstream's minter signs name no ports.
    Sandbox { namespace: String, name: String },
}

impl Opened {
    pub fn permits(&self, namespace: &str, sandbox: &str, port: u16) -> bool {
        match self {
            Opened::Ports(scope) => scope.permits(namespace, sandbox, port),
            Opened::Sandbox {
                namespace: of,
                name,
            } => of == namespace && name == sandbox,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("the secret is shorter than {SHORTEST_SECRET} bytes")]
    ShortSecret,
    #[error("the PEM file holds no Ed25519 key")]
    NotEd25519,
    #[error("a public key can check tokens, not mint them")]
    CannotSign,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("it is not a token")]
    Malformed,
    #[error("its signature is wrong")]
    Signature,
    #[error("it has expired")]
    Expired,
}

#[derive(Serialize, Deserialize)]
struct Header {
    alg: String,
    typ: Option<String>,
}

/// The payload of a token in upstream's format: base64url of this, a dot, and base64url of its HMAC-SHA256.
#[derive(Serialize, Deserialize)]
struct UpstreamClaims {
    #[serde(rename = "ns")]
    namespace: String,
    name: String,
    #[serde(rename = "exp")]
    expires: u64,
}

/// A key that verifies tokens, and signs them unless it is only a public key.
pub struct TokenKey(Key);

enum Key {
    Secret(hmac::Key),
    Pair(Ed25519KeyPair),
    Public(Vec<u8>),
}

impl std::fmt::Debug for TokenKey {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self.0 {
            Key::Secret(_) => "TokenKey(secret)",
            Key::Pair(_) => "TokenKey(pair)",
            Key::Public(_) => "TokenKey(public)",
        })
    }
}

impl TokenKey {
    /// Parses a key file: an Ed25519 private or public key as PEM, or else a secret, of which surrounding white space is
    /// removed.
    pub fn parse(bytes: &[u8]) -> Result<Self, KeyError> {
        let text = bytes.trim_ascii();
        if text.starts_with(b"-----BEGIN ") {
            return Self::from_pem(text);
        }
        if text.len() < SHORTEST_SECRET {
            return Err(KeyError::ShortSecret);
        }
        Ok(Self(Key::Secret(hmac::Key::new(hmac::HMAC_SHA256, text))))
    }

    fn from_pem(text: &[u8]) -> Result<Self, KeyError> {
        for item in rustls_pemfile::read_all(&mut &text[..]).filter_map(Result::ok) {
            match item {
                rustls_pemfile::Item::Pkcs8Key(key) => {
                    let pair = Ed25519KeyPair::from_pkcs8_maybe_unchecked(key.secret_pkcs8_der());
                    return pair
                        .map(|pair| Self(Key::Pair(pair)))
                        .map_err(|_| KeyError::NotEd25519);
                }
                rustls_pemfile::Item::SubjectPublicKeyInfo(key) => {
                    let public = key
                        .strip_prefix(&PUBLIC_KEY_PREFIX)
                        .filter(|public| public.len() == 32);
                    return public
                        .map(|public| Self(Key::Public(public.to_vec())))
                        .ok_or(KeyError::NotEd25519);
                }
                _ => {}
            }
        }
        Err(KeyError::NotEd25519)
    }

    fn algorithm(&self) -> &'static str {
        match self.0 {
            Key::Secret(_) => "HS256",
            Key::Pair(_) | Key::Public(_) => "EdDSA",
        }
    }

    /// Signs a token for `scope`.
    pub fn mint(&self, scope: &Scope) -> Result<String, KeyError> {
        let header = Header {
            alg: self.algorithm().to_owned(),
            typ: Some("JWT".to_owned()),
        };
        let encode = |json: Result<Vec<u8>, serde_json::Error>| {
            URL_SAFE_NO_PAD.encode(json.unwrap_or_default())
        };
        let signed = format!(
            "{}.{}",
            encode(serde_json::to_vec(&header)),
            encode(serde_json::to_vec(scope))
        );
        let signature = match &self.0 {
            Key::Secret(key) => URL_SAFE_NO_PAD.encode(hmac::sign(key, signed.as_bytes())),
            Key::Pair(pair) => URL_SAFE_NO_PAD.encode(pair.sign(signed.as_bytes())),
            Key::Public(_) => return Err(KeyError::CannotSign),
        };
        Ok(format!("{signed}.{signature}"))
    }

    /// Verifies a token's signature and expiry, and returns what it permits.
    pub fn verify(&self, token: &str, now: SystemTime) -> Result<Opened, TokenError> {
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let Some((header, scope)) = signed.split_once('.') else {
            return self.verify_upstream(signed, signature, now);
        };
        let signature = decode(signature)?;
        let header: Header =
            serde_json::from_slice(&decode(header)?).map_err(|_| TokenError::Malformed)?;
        if header.alg != self.algorithm() {
            return Err(TokenError::Signature);
        }
        let genuine = match &self.0 {
            Key::Secret(key) => hmac::verify(key, signed.as_bytes(), &signature).is_ok(),
            Key::Pair(pair) => is_signed_by(pair.public_key().as_ref(), signed, &signature),
            Key::Public(public) => is_signed_by(public, signed, &signature),
        };
        if !genuine {
            return Err(TokenError::Signature);
        }
        let scope: Scope =
            serde_json::from_slice(&decode(scope)?).map_err(|_| TokenError::Malformed)?;
        if scope.expires <= seconds_since_epoch(now) {
            Err(TokenError::Expired)
        } else {
            Ok(Opened::Ports(scope))
        }
    }

    /// Verifies a token of upstream's minter. Its signed part contains no dot, so a signature of one format is never valid in the other.
    fn verify_upstream(
        &self,
        payload: &str,
        signature: &str,
        now: SystemTime,
    ) -> Result<Opened, TokenError> {
        let Key::Secret(key) = &self.0 else {
            return Err(TokenError::Malformed);
        };
        hmac::verify(key, payload.as_bytes(), &decode(signature)?)
            .map_err(|_| TokenError::Signature)?;
        let claims: UpstreamClaims =
            serde_json::from_slice(&decode(payload)?).map_err(|_| TokenError::Malformed)?;
        if claims.expires <= seconds_since_epoch(now) {
            return Err(TokenError::Expired);
        }
        Ok(Opened::Sandbox {
            namespace: claims.namespace,
            name: claims.name,
        })
    }
}

fn decode(text: &str) -> Result<Vec<u8>, TokenError> {
    URL_SAFE_NO_PAD
        .decode(text)
        .map_err(|_| TokenError::Malformed)
}

fn is_signed_by(public: &[u8], signed: &str, signature: &[u8]) -> bool {
    UnparsedPublicKey::new(&ED25519, public)
        .verify(signed.as_bytes(), signature)
        .is_ok()
}

fn seconds_since_epoch(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECRET: &[u8] = b"  0123456789abcdef0123456789abcdef\n";

    fn now() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000)
    }

    fn scope() -> Scope {
        Scope::new(
            "default",
            "abc",
            &[8888, 3000],
            now(),
            Duration::from_secs(60),
        )
    }

    fn pair() -> (TokenKey, TokenKey) {
        let document = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).unwrap();
        let pair = Ed25519KeyPair::from_pkcs8(document.as_ref()).unwrap();
        let mut public = PUBLIC_KEY_PREFIX.to_vec();
        public.extend_from_slice(pair.public_key().as_ref());
        let pem = |label: &str, der: &[u8]| {
            let body = base64::engine::general_purpose::STANDARD.encode(der);
            format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n")
        };
        let private = TokenKey::parse(pem("PRIVATE KEY", document.as_ref()).as_bytes()).unwrap();
        (
            private,
            TokenKey::parse(pem("PUBLIC KEY", &public).as_bytes()).unwrap(),
        )
    }

    #[test]
    fn a_token_permits_its_ports_of_its_sandbox_until_it_expires() {
        let secret = TokenKey::parse(SECRET).unwrap();
        let (private, public) = pair();
        for (minting, checking) in [
            (&secret, &secret),
            (&private, &private),
            (&private, &public),
        ] {
            let token = minting.mint(&scope()).unwrap();
            let opened = checking.verify(&token, now()).unwrap();
            assert!(opened.permits("default", "abc", 3000));
            assert!(!opened.permits("default", "abc", 3001));
            assert!(!opened.permits("default", "other", 3000));
            assert!(!opened.permits("other", "abc", 3000));
            assert_eq!(
                checking.verify(&token, now() + Duration::from_secs(60)),
                Err(TokenError::Expired)
            );
        }
        assert_eq!(public.mint(&scope()), Err(KeyError::CannotSign));
    }

    #[test]
    fn a_token_of_another_key_or_algorithm_is_refused() {
        let secret = TokenKey::parse(SECRET).unwrap();
        let other = TokenKey::parse(b"ffffffffffffffffffffffffffffffff").unwrap();
        let (private, public) = pair();
        let token = secret.mint(&scope()).unwrap();
        assert_eq!(other.verify(&token, now()), Err(TokenError::Signature));
        assert_eq!(public.verify(&token, now()), Err(TokenError::Signature));
        assert_eq!(
            secret.verify(&private.mint(&scope()).unwrap(), now()),
            Err(TokenError::Signature)
        );
        // The classic attack: `alg: none`, without a signature.
        let unsigned = format!(
            "{}.{}.",
            URL_SAFE_NO_PAD.encode(br#"{"alg":"none"}"#),
            token.split('.').nth(1).unwrap()
        );
        assert_eq!(secret.verify(&unsigned, now()), Err(TokenError::Signature));
    }

    #[test]
    fn a_token_whose_header_names_another_algorithm_is_refused() {
        let key = TokenKey::parse(SECRET).unwrap();
        let scope = serde_json::to_vec(&scope()).unwrap();
        for (algorithm, genuine) in [("HS256", true), ("none", false), ("EdDSA", false)] {
            let header = format!(r#"{{"alg":"{algorithm}"}}"#);
            let (header, scope) = (
                URL_SAFE_NO_PAD.encode(header),
                URL_SAFE_NO_PAD.encode(&scope),
            );
            let signed = format!("{header}.{scope}");
            let secret = hmac::Key::new(hmac::HMAC_SHA256, SECRET.trim_ascii());
            let signature = URL_SAFE_NO_PAD.encode(hmac::sign(&secret, signed.as_bytes()));
            let token = format!("{signed}.{signature}");
            assert_eq!(key.verify(&token, now()).is_ok(), genuine, "{algorithm}");
        }
    }

    #[test]
    fn a_token_of_upstreams_minter_permits_every_port_of_its_sandbox_until_it_expires() {
        let key = TokenKey::parse(SECRET).unwrap();
        let sign = |secret: &[u8], claims: &str| {
            let payload = URL_SAFE_NO_PAD.encode(claims);
            let secret = hmac::Key::new(hmac::HMAC_SHA256, secret);
            let signature = URL_SAFE_NO_PAD.encode(hmac::sign(&secret, payload.as_bytes()));
            format!("{payload}.{signature}")
        };
        let claims = r#"{"ns":"default","name":"abc","exp":1000001}"#;
        let token = sign(SECRET.trim_ascii(), claims);
        let opened = key.verify(&token, now()).unwrap();
        assert!(opened.permits("default", "abc", 1));
        assert!(!opened.permits("default", "other", 1));
        assert!(!opened.permits("other", "abc", 1));
        let later = now() + Duration::from_secs(1);
        assert_eq!(key.verify(&token, later), Err(TokenError::Expired));
        let forged = sign(&[7; 32], claims);
        assert_eq!(key.verify(&forged, now()), Err(TokenError::Signature));
        let (private, public) = pair();
        for pair in [private, public] {
            assert_eq!(pair.verify(&token, now()), Err(TokenError::Malformed));
        }
    }

    #[test]
    fn weak_or_foreign_keys_are_refused() {
        assert_eq!(
            TokenKey::parse(b"short").unwrap_err(),
            KeyError::ShortSecret
        );
        let pem = b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n";
        assert_eq!(TokenKey::parse(pem).unwrap_err(), KeyError::NotEd25519);
    }

    proptest! {
        #[test]
        fn every_changed_token_is_refused(at in 0usize..200, with in "[A-Za-z0-9._-]") {
            let key = TokenKey::parse(SECRET).unwrap();
            let token = key.mint(&scope()).unwrap();
            let at = at % token.len();
            let changed = format!("{}{with}{}", &token[..at], &token[at + 1..]);
            // The last character of the signature has unused bits.
            prop_assume!(changed != token && at + 1 != token.len());
            prop_assert!(key.verify(&changed, now()).is_err());
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,100}") {
            prop_assert!(TokenKey::parse(SECRET).unwrap().verify(&text, now()).is_err());
        }
    }
}
