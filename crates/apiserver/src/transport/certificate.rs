//! Authentication by client certificate: as in Kubernetes, the common name is the user and the organizations are the groups. The
//! TLS handshake has already verified the certificate.

use rustls::pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use x509_parser::{
    prelude::{FromDer, X509Certificate},
    x509::AttributeTypeAndValue,
};

use crate::auth::{AUTHENTICATED, User};

/// The user of a certificate; `None` if it has no common name.
pub fn user(certificate: &CertificateDer<'_>) -> Option<User> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let text =
        |attribute: &AttributeTypeAndValue<'_>| attribute.as_str().ok().map(ToOwned::to_owned);
    let name = parsed.subject().iter_common_name().find_map(text)?;
    if name.is_empty() {
        return None;
    }
    let mut groups: Vec<String> = parsed
        .subject()
        .iter_organization()
        .filter_map(text)
        .collect();
    groups.push(AUTHENTICATED.to_owned());
    let digest = Sha256::digest(certificate.as_ref());
    let mut user = User {
        name,
        groups,
        ..User::default()
    };
    user.extra.insert(
        "authentication.kubernetes.io/credential-id".into(),
        vec![format!("X509SHA256={digest:x}")],
    );
    Some(user)
}
