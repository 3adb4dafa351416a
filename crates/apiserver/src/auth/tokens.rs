//! Service-account tokens: signed, with an expiry, and bound to an account and optionally to a pod. Only this server verifies
//! them, so one symmetric key signs and verifies.

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The issuer of tokens, and their default audience.
pub const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

const BLOCK: usize = 64;

/// The claims of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claims {
    /// Namespace of the account.
    pub namespace: String,
    /// Name of the account.
    pub account: String,
    /// UID of the account.
    pub account_uid: String,
    /// Name and UID of the pod it is bound to.
    pub pod: Option<(String, String)>,
    /// The audiences of the token.
    pub audiences: Vec<String>,
    /// The expiry time.
    pub expires: Timestamp,
}

/// The signing key.
#[derive(Clone)]
pub struct Signer([u8; 32]);

impl std::fmt::Debug for Signer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Signer")
    }
}

impl Signer {
    /// A signer whose key is derived from a secret.
    pub fn new(secret: &[u8]) -> Self {
        Self(Sha256::digest([b"service-account-tokens:", secret].concat()).into())
    }

    /// HMAC-SHA256 over the message.
    fn sign(&self, message: &[u8]) -> [u8; 32] {
        let pad = |with: u8| -> Vec<u8> {
            let mut block = vec![with; BLOCK];
            block
                .iter_mut()
                .zip(self.0)
                .for_each(|(byte, key)| *byte ^= key);
            block
        };
        let inner = Sha256::new()
            .chain_update(pad(0x36))
            .chain_update(message)
            .finalize();
        Sha256::new()
            .chain_update(pad(0x5c))
            .chain_update(inner)
            .finalize()
            .into()
    }

    /// Issues a token with the claims.
    pub fn issue(&self, claims: &Claims, now: Timestamp) -> String {
        let mut private = json!({"namespace": claims.namespace, "serviceaccount": {"name": claims.account, "uid": claims.account_uid}});
        if let Some((name, uid)) = &claims.pod {
            private["pod"] = json!({"name": name, "uid": uid});
        }
        let payload = json!({
            "iss": ISSUER, "aud": claims.audiences, "exp": claims.expires.as_second(), "iat": now.as_second(), "nbf": now.as_second(),
            "sub": format!("system:serviceaccount:{}:{}", claims.namespace, claims.account), "kubernetes.io": private,
        });
        let header = json!({"alg": "HS256", "typ": "JWT"});
        let message = format!(
            "{}.{}",
            URL_SAFE_NO_PAD.encode(header.to_string()),
            URL_SAFE_NO_PAD.encode(payload.to_string())
        );
        let signature = URL_SAFE_NO_PAD.encode(self.sign(message.as_bytes()));
        format!("{message}.{signature}")
    }

    /// Verifies a token. Returns its claims if this signer issued it and it has not expired.
    pub fn verify(&self, token: &str, now: Timestamp) -> Option<Claims> {
        let (message, signature) = token.rsplit_once('.')?;
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        // Compares digests, so that the duration of the comparison reveals nothing about the signature (timing attack).
        if Sha256::digest(&signature) != Sha256::digest(self.sign(message.as_bytes())) {
            return None;
        }
        let (_, payload) = message.split_once('.')?;
        let payload: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(payload).ok()?).ok()?;
        let expires = Timestamp::from_second(payload["exp"].as_i64()?).ok()?;
        let starts = Timestamp::from_second(payload["nbf"].as_i64()?).ok()?;
        if now >= expires || now.saturating_add(SignedDuration::from_secs(60)).ok()? < starts {
            return None;
        }
        let private = &payload["kubernetes.io"];
        let text = |value: &Value| value.as_str().map(ToOwned::to_owned);
        let pod = private
            .get("pod")
            .and_then(|pod| Some((text(&pod["name"])?, text(&pod["uid"])?)));
        Some(Claims {
            namespace: text(&private["namespace"])?,
            account: text(&private["serviceaccount"]["name"])?,
            account_uid: text(&private["serviceaccount"]["uid"])?,
            pod,
            audiences: payload["aud"].as_array()?.iter().filter_map(text).collect(),
            expires,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(expires: Timestamp) -> Claims {
        Claims {
            namespace: "n".into(),
            account: "a".into(),
            account_uid: "u".into(),
            pod: Some(("p".into(), "q".into())),
            audiences: vec![ISSUER.into()],
            expires,
        }
    }

    #[test]
    fn a_token_is_valid_until_it_expires_and_only_unmodified() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let later: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
        let signer = Signer::new(b"secret");
        let token = signer.issue(&claims(later), now);
        assert_eq!(signer.verify(&token, now), Some(claims(later)));
        assert_eq!(signer.verify(&token, later), None, "expired");
        assert_eq!(
            Signer::new(b"other").verify(&token, now),
            None,
            "another key"
        );
        let (head, rest) = token.split_once('.').unwrap();
        let (payload, signature) = rest.split_once('.').unwrap();
        let forged = String::from_utf8(URL_SAFE_NO_PAD.decode(payload).unwrap())
            .unwrap()
            .replace("\"a\"", "\"b\"");
        assert_eq!(
            signer.verify(
                &format!("{head}.{}.{signature}", URL_SAFE_NO_PAD.encode(forged)),
                now
            ),
            None,
            "changed"
        );
        assert_eq!(signer.verify("garbage", now), None);
    }

    #[test]
    fn the_signature_is_hmac_sha256() {
        // RFC 4231, test case 2, with the key padded to the signer's fixed length.
        let mut key = [0; 32];
        key[..4].copy_from_slice(b"Jefe");
        let expected = [
            0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e, 0x6a, 0x04, 0x24, 0x26, 0x08, 0x95,
            0x75, 0xc7, 0x5a, 0x00, 0x3f, 0x08, 0x9d, 0x27, 0x39, 0x83, 0x9d, 0xec, 0x58, 0xb9,
            0x64, 0xec, 0x38, 0x43,
        ];
        let found = Signer(key).sign(b"what do ya want for nothing?");
        assert_eq!(found, expected);
    }
}
