//! The router's command line, in upstream's spelling, and the environment variables of its first releases.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use crate::config::{
    AuthorizationMode, Config, ConfigError, ListenAddress, MutualTls, TlsConfig, parse_duration,
    positive_seconds,
};

/// Who may use a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AuthzMode {
    None,
    #[value(name = "tokenreview")]
    TokenReview,
    #[value(name = "scoped-token")]
    ScopedToken,
}

/// Whether clients show a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MtlsMode {
    #[value(aliases = ["disabled", "none"])]
    Off,
    #[value(aliases = ["request", "permissive"])]
    Optional,
    #[value(aliases = ["require", "strict"])]
    Required,
}

/// Flags of the router.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Where to serve HTTP/1.1 and HTTP/2 without TLS; empty or 0 for nowhere
    #[arg(long, value_name = "ADDRESS", default_value = ":8080")]
    pub http_bind_address: String,
    /// Where to serve HTTPS, once a certificate is given
    #[arg(long, value_name = "ADDRESS", default_value = ":8443")]
    pub https_bind_address: String,
    /// The certificate chain for HTTPS, reloaded when it changes
    #[arg(long, value_name = "FILE")]
    pub tls_cert_file: Option<PathBuf>,
    /// The certificate's private key
    #[arg(long, value_name = "FILE")]
    pub tls_key_file: Option<PathBuf>,
    /// Who signs client certificates
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca_file: Option<PathBuf>,
    /// Whether clients must show a certificate; with a client CA, `required` unless said otherwise
    #[arg(long, value_enum, value_name = "MODE")]
    pub mtls_mode: Option<MtlsMode>,
    /// Where to serve /metrics; 0 for nowhere
    #[arg(long, value_name = "ADDRESS", default_value = ":9090")]
    pub metrics_bind_address: String,
    /// Where to serve /healthz and /readyz; 0 for nowhere
    #[arg(long, value_name = "ADDRESS", default_value = ":8081")]
    pub health_probe_bind_address: String,
    /// The suffix of services' names, for resolution by DNS [default: cluster.local] [env: CLUSTER_DOMAIN]
    #[arg(long, value_name = "DOMAIN")]
    pub cluster_domain: Option<String>,
    /// How long a sandbox may be silent [default: 180s] [env: PROXY_TIMEOUT_SECONDS]
    #[arg(long, value_name = "DURATION")]
    pub proxy_timeout: Option<String>,
    /// How often a failed dial is repeated
    #[arg(long, value_name = "COUNT", default_value_t = 3)]
    pub upstream_max_retries: u32,
    /// How long one dial may take
    #[arg(long, value_name = "DURATION", default_value = "5s")]
    pub upstream_dial_timeout: String,
    /// Larger request bodies are refused; 0 means no limit
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub max_request_body_bytes: u64,
    /// Log every request
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true")]
    pub access_log: bool,
    /// Export traces by OTLP over gRPC, to where OTEL_EXPORTER_OTLP_ENDPOINT says
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true")]
    pub enable_tracing: bool,
    /// How long connections are still taken when the router stops, while /readyz already says no [default: none]
    #[arg(long, value_name = "DURATION")]
    pub shutdown_delay: Option<String>,
    /// What requests in flight get when the router stops
    #[arg(long, value_name = "DURATION", default_value = "30s")]
    pub shutdown_timeout: String,
    /// Route <port>-<sandbox>.<domain> and <port>-<namespace>--<sandbox>.<domain>; may be repeated
    #[arg(long, value_name = "DOMAIN", value_delimiter = ',')]
    pub host_domain: Vec<String>,
    /// Route /sandbox/<namespace>/<id>/<port>/…
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true")]
    pub path_routing: bool,
    /// Who may use a sandbox
    #[arg(long, value_enum, value_name = "MODE", default_value = "none")]
    pub authz_mode: AuthzMode,
    /// Audiences a reviewed token must be for
    #[arg(long, value_name = "AUDIENCE", value_delimiter = ',')]
    pub authz_token_audience: Vec<String>,
    /// The key of scoped tokens: a secret of at least 32 bytes, or an Ed25519 key as PEM
    #[arg(long, value_name = "FILE")]
    pub scoped_token_key_file: Option<PathBuf>,
    /// How long a sandbox that is not known, or not up yet, is waited for
    #[arg(long, value_name = "DURATION", default_value = "2s")]
    pub resolve_wait: String,
}

impl Args {
    /// The configuration these flags mean. `variable` looks an environment variable up; a value there that makes no
    /// sense is warned about and passed over, as the first releases did, while a flag that makes none is an error.
    pub fn into_config(
        self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Config, ConfigError> {
        let defaults = Config::default();
        let proxy_timeout = match &self.proxy_timeout {
            Some(text) => duration("proxy-timeout", text)?,
            None => proxy_timeout_from(variable("PROXY_TIMEOUT_SECONDS"))
                .unwrap_or(defaults.proxy_timeout),
        };
        let cluster_domain = match &self.cluster_domain {
            Some(domain) if !domain.is_empty() => domain.clone(),
            _ => cluster_domain_from(variable("CLUSTER_DOMAIN")).unwrap_or(defaults.cluster_domain),
        };
        Ok(Config {
            http_listen: address("http-bind-address", &self.http_bind_address)?,
            https_listen: address("https-bind-address", &self.https_bind_address)?,
            metrics_listen: address("metrics-bind-address", &self.metrics_bind_address)?,
            health_listen: address("health-probe-bind-address", &self.health_probe_bind_address)?,
            tls: self.tls()?,
            authorization: self.authorization()?,
            cluster_domain,
            proxy_timeout,
            dial_retries: self.upstream_max_retries,
            dial_timeout: duration("upstream-dial-timeout", &self.upstream_dial_timeout)?,
            max_request_body_bytes: self.max_request_body_bytes,
            access_log: self.access_log,
            shutdown_delay: match &self.shutdown_delay {
                Some(text) => duration("shutdown-delay", text)?,
                None => defaults.shutdown_delay,
            },
            shutdown_timeout: duration("shutdown-timeout", &self.shutdown_timeout)?,
            host_domains: self
                .host_domain
                .iter()
                .map(|domain| domain.to_ascii_lowercase())
                .collect(),
            path_routing: self.path_routing,
            tunnels: false,
            own_names: defaults.own_names,
            resolve_wait: duration("resolve-wait", &self.resolve_wait)?,
            header_timeout: defaults.header_timeout,
        })
    }

    fn tls(&self) -> Result<Option<TlsConfig>, ConfigError> {
        let (certificate_file, key_file) = match (&self.tls_cert_file, &self.tls_key_file) {
            (Some(certificate), Some(key)) => (certificate.clone(), key.clone()),
            (None, None) if self.tls_client_ca_file.is_none() => return Ok(None),
            (Some(_), None) => return Err(needed("tls-key-file", "with --tls-cert-file")),
            (None, _) => return Err(needed("tls-cert-file", "for TLS")),
        };
        let mutual = match (self.mtls_mode, &self.tls_client_ca_file) {
            (Some(MtlsMode::Off), _) | (None, None) => MutualTls::Off,
            (Some(_), None) => return Err(needed("tls-client-ca-file", "for client certificates")),
            (Some(MtlsMode::Optional), Some(_)) => MutualTls::Optional,
            (Some(MtlsMode::Required) | None, Some(_)) => MutualTls::Required,
        };
        Ok(Some(TlsConfig {
            certificate_file,
            key_file,
            client_ca_file: self.tls_client_ca_file.clone(),
            mutual,
        }))
    }

    fn authorization(&self) -> Result<AuthorizationMode, ConfigError> {
        match self.authz_mode {
            AuthzMode::None => Ok(AuthorizationMode::None),
            AuthzMode::TokenReview => Ok(AuthorizationMode::TokenReview {
                audiences: self.authz_token_audience.clone(),
            }),
            AuthzMode::ScopedToken => {
                let key_file = self.scoped_token_key_file.clone();
                let key_file = key_file.ok_or_else(|| {
                    needed("scoped-token-key-file", "with --authz-mode=scoped-token")
                })?;
                Ok(AuthorizationMode::ScopedToken { key_file })
            }
        }
    }
}

fn needed(flag: &'static str, when: &'static str) -> ConfigError {
    ConfigError::Needed { flag, when }
}

fn duration(flag: &'static str, text: &str) -> Result<Duration, ConfigError> {
    let expected = "a duration such as 30s";
    parse_duration(text).ok_or_else(|| ConfigError::Value {
        flag,
        value: text.to_owned(),
        expected,
    })
}

fn address(flag: &'static str, text: &str) -> Result<ListenAddress, ConfigError> {
    let expected = "an address such as :8080";
    ListenAddress::parse(text).ok_or_else(|| ConfigError::Value {
        flag,
        value: text.to_owned(),
        expected,
    })
}

fn proxy_timeout_from(variable: Option<String>) -> Option<Duration> {
    let text = variable?;
    let parsed = text.trim().parse().ok().and_then(positive_seconds);
    if parsed.is_none() {
        tracing::warn!(value = %text, "PROXY_TIMEOUT_SECONDS is not a positive number; the default is used");
    }
    parsed
}

fn cluster_domain_from(variable: Option<String>) -> Option<String> {
    let domain = variable?.trim().to_owned();
    if domain.is_empty() {
        tracing::warn!("CLUSTER_DOMAIN is empty; the default is used");
        return None;
    }
    Some(domain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn config(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let line = Line::try_parse_from(std::iter::once("router").chain(arguments.iter().copied()))
            .unwrap();
        line.args.into_config(|wanted| {
            environment
                .iter()
                .find(|(name, _)| *name == wanted)
                .map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn no_flags_mean_the_defaults() {
        assert_eq!(config(&[], &[]).unwrap(), Config::default());
    }

    #[test]
    fn upstreams_flags_are_understood() {
        let config = config(
            &[
                "--http-bind-address=127.0.0.1:1",
                "--https-bind-address=:2",
                "--tls-cert-file=c",
                "--tls-key-file=k",
                "--tls-client-ca-file=a",
                "--mtls-mode=optional",
                "--metrics-bind-address=0",
                "--health-probe-bind-address=:3",
                "--cluster-domain=x.y",
                "--proxy-timeout=10s",
                "--upstream-max-retries=5",
                "--max-request-body-bytes=7",
                "--access-log",
                "--shutdown-timeout=1m",
            ],
            &[("PROXY_TIMEOUT_SECONDS", "99"), ("CLUSTER_DOMAIN", "z")],
        )
        .unwrap();
        assert_eq!(config.proxy_timeout, Duration::from_secs(10));
        assert_eq!(config.cluster_domain, "x.y");
        assert_eq!(config.tls.unwrap().mutual, MutualTls::Optional);
        assert_eq!(config.metrics_listen, ListenAddress::Off);
        assert!(config.access_log);
    }

    #[test]
    fn environment_variables_fall_back_when_they_make_no_sense() {
        let from = |name, value| config(&[], &[(name, value)]).unwrap();
        assert_eq!(
            from("PROXY_TIMEOUT_SECONDS", "12.5").proxy_timeout,
            Duration::from_millis(12_500)
        );
        for wrong in ["abc", "0", "-3", "", "inf", "nan", "3s"] {
            assert_eq!(
                from("PROXY_TIMEOUT_SECONDS", wrong).proxy_timeout,
                Duration::from_secs(180),
                "{wrong}"
            );
        }
        assert_eq!(
            from("CLUSTER_DOMAIN", "corp.example").cluster_domain,
            "corp.example"
        );
        for wrong in ["", "  "] {
            assert_eq!(
                from("CLUSTER_DOMAIN", wrong).cluster_domain,
                "cluster.local"
            );
        }
    }

    #[test]
    fn flags_that_need_another_say_so() {
        for (arguments, flag) in [
            (&["--tls-cert-file=c"][..], "tls-key-file"),
            (&["--tls-client-ca-file=c"], "tls-cert-file"),
            (
                &[
                    "--tls-cert-file=c",
                    "--tls-key-file=k",
                    "--mtls-mode=required",
                ],
                "tls-client-ca-file",
            ),
            (&["--authz-mode=scoped-token"], "scoped-token-key-file"),
        ] {
            match config(arguments, &[]).unwrap_err() {
                ConfigError::Needed { flag: named, .. } => assert_eq!(named, flag),
                other @ ConfigError::Value { .. } => panic!("{other}"),
            }
        }
        assert!(config(&["--proxy-timeout=never"], &[]).is_err());
    }
}
