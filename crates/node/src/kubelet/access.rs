//! Authenticates and authorizes clients through the API server (TokenReview and SubjectAccessReview), like a kubelet in webhook mode.

use http::Method;
use http::request::Parts;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use streaming::kubelet::{Access, Authenticator, PeerCertificates, bearer_token};
use x509_parser::prelude::{FromDer, X509Certificate};

use api::errors::chain;

/// An authenticated user.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Subject {
    name: String,
    groups: Vec<String>,
}

/// The authenticator and authorizer.
#[derive(Clone)]
pub struct ApiAuthority {
    pub client: Client,
    pub node_name: String,
}

impl Authenticator for ApiAuthority {
    async fn check(&self, request: &Parts) -> Access {
        let Some(subject) = self.identify(request).await else {
            return Access::Unauthenticated;
        };
        let verb = verb(&request.method, request.uri.path());
        match self.may(&subject, verb).await {
            Ok(true) => Access::Allowed,
            Ok(false) => Access::Forbidden(format!(
                "user={}, verb={verb}, resource=nodes, subresource=proxy",
                subject.name
            )),
            Err(error) => {
                tracing::warn!(error = %chain(&error), "the API server does not say who may use the streaming API");
                Access::Forbidden("the API server could not be asked".to_owned())
            }
        }
    }
}

impl ApiAuthority {
    async fn identify(&self, request: &Parts) -> Option<Subject> {
        let shown = request.extensions.get::<PeerCertificates>();
        if let Some(certificate) = shown.and_then(|certificates| certificates.0.first()) {
            return subject_of(certificate);
        }
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(bearer_token(request)?.to_owned()),
                ..TokenReviewSpec::default()
            },
            ..TokenReview::default()
        };
        let reviews = Api::<TokenReview>::all(self.client.clone());
        let answer = match reviews.create(&PostParams::default(), &review).await {
            Ok(review) => review.status?,
            Err(error) => {
                tracing::warn!(error = %chain(&error), "the API server does not say whose a token is");
                return None;
            }
        };
        let user = answer.user.filter(|_| answer.authenticated == Some(true))?;
        Some(Subject {
            name: user.username?,
            groups: user.groups.unwrap_or_default(),
        })
    }

    async fn may(&self, subject: &Subject, verb: &str) -> Result<bool, kube::Error> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(subject.name.clone()),
                groups: Some(subject.groups.clone()),
                resource_attributes: Some(ResourceAttributes {
                    verb: Some(verb.to_owned()),
                    version: Some("v1".to_owned()),
                    resource: Some("nodes".to_owned()),
                    subresource: Some("proxy".to_owned()),
                    name: Some(self.node_name.clone()),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let reviews = Api::<SubjectAccessReview>::all(self.client.clone());
        let answer = reviews.create(&PostParams::default(), &review).await?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }
}

/// The verb that a request needs on `nodes/proxy`. A request that opens a stream into a container runs commands, even if it is a GET,
/// as for a WebSocket: it needs `create`, so that a role that may only `get`, such as one that scrapes metrics, does not suffice.
fn verb(method: &Method, path: &str) -> &'static str {
    const STREAMS: [&str; 4] = ["exec", "attach", "portForward", "run"];
    let first = path.split('/').find(|segment| !segment.is_empty());
    if first.is_some_and(|first| STREAMS.contains(&first)) {
        return "create";
    }
    match *method {
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "get",
    }
}

/// The user of a verified client certificate: its common name, with its organizations as groups.
fn subject_of(certificate: &[u8]) -> Option<Subject> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let subject = certificate.subject();
    let name = subject.iter_common_name().next()?.as_str().ok()?.to_owned();
    let groups = subject
        .iter_organization()
        .filter_map(|group| group.as_str().ok())
        .map(ToOwned::to_owned)
        .chain(["system:authenticated".to_owned()])
        .collect();
    Some(Subject { name, groups })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_into_a_container_takes_the_right_to_create() {
        for path in [
            "/exec/n/p/c",
            "/attach/n/p/c",
            "/portForward/n/p",
            "//exec/n/p/c",
        ] {
            assert_eq!(verb(&Method::GET, path), "create", "{path}");
            assert_eq!(verb(&Method::POST, path), "create", "{path}");
        }
        for path in ["/containerLogs/n/p/c", "/pods", "/"] {
            assert_eq!(verb(&Method::GET, path), "get", "{path}");
        }
    }

    #[test]
    fn a_certificate_names_its_user_and_groups() {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        for (kind, value) in [
            (rcgen::DnType::CommonName, "kube-apiserver-kubelet-client"),
            (rcgen::DnType::OrganizationName, "system:masters"),
        ] {
            params.distinguished_name.push(kind, value);
        }
        let certificate = params.self_signed(&key).unwrap();
        let subject = subject_of(certificate.der()).unwrap();
        assert_eq!(subject.name, "kube-apiserver-kubelet-client");
        assert_eq!(subject.groups, ["system:masters", "system:authenticated"]);
        assert_eq!(subject_of(b"no certificate"), None);
    }
}
