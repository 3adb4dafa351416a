//! The flags for proxying requests that `agent-sandbox router` and `agent-sandbox up` share. `up` takes each with the
//! prefix `router-`. Pure, except for a warning about an invalid environment variable.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::BoolishValueParser;

use crate::config::{
    AuthorizationMode, Config, ConfigError, DEFAULT_PATH_PREFIX, MutualTls, ReviewCache, TlsConfig,
    parse_duration, parse_path_prefix, positive_seconds,
};

/// Whether clients must present a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MtlsMode {
    #[value(aliases = ["disabled", "none"])]
    Off,
    #[value(aliases = ["request", "permissive"])]
    Optional,
    #[value(aliases = ["require", "strict"])]
    Required,
}

/// Flags for proxying requests. Flags that are not given leave [`Config::default`] unchanged.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub struct ProxyArgs {
    /// The certificate chain for HTTPS, reloaded when it changes
    #[arg(long, value_name = "FILE")]
    pub tls_cert_file: Option<PathBuf>,
    /// The certificate's private key
    #[arg(long, value_name = "FILE")]
    pub tls_key_file: Option<PathBuf>,
    /// The CA that signs client certificates
    #[arg(long, value_name = "FILE")]
    pub tls_client_ca_file: Option<PathBuf>,
    /// Whether clients must present a certificate; with a client CA the default is `required`
    #[arg(long, value_enum, value_name = "MODE")]
    pub mtls_mode: Option<MtlsMode>,
    /// The DNS suffix of Service names, for resolution by DNS [default: cluster.local] [env: CLUSTER_DOMAIN]
    #[arg(long, value_name = "DOMAIN")]
    pub cluster_domain: Option<String>,
    /// Idle timeout of a sandbox: before and between parts of its response [default: 180s] [env: PROXY_TIMEOUT_SECONDS]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub proxy_timeout: Option<Duration>,
    /// Timeout for the head of a sandbox's response [default: as --proxy-timeout]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub response_header_timeout: Option<Duration>,
    /// How often a failed dial is retried [default: 3]
    #[arg(long, value_name = "COUNT")]
    pub upstream_max_retries: Option<u32>,
    /// The pause before the first retry of a dial; each further pause is twice as long [default: 200ms]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub upstream_retry_initial_delay: Option<Duration>,
    /// The longest pause between two dials [default: 800ms]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub upstream_retry_max_delay: Option<Duration>,
    /// Timeout of one dial [default: 5s]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub upstream_dial_timeout: Option<Duration>,
    /// Larger request bodies are refused; 0 means no limit [default: 0]
    #[arg(long, value_name = "BYTES")]
    pub max_request_body_bytes: Option<u64>,
    /// Log every request
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    pub access_log: bool,
    /// How long requests in flight may run after the router stops accepting [default: 30s]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub shutdown_timeout: Option<Duration>,
    /// Route /sandbox/<namespace>/<id>/<port>/…
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = clap::ArgAction::Set)]
    pub path_routing: bool,
    /// Route <prefix>/<namespace>/<id>/<port>/…; empty routes no path
    #[arg(long, value_name = "PREFIX")]
    pub path_routing_prefix: Option<String>,
    /// Audiences for which a reviewed token must be valid
    #[arg(
        long,
        value_name = "AUDIENCE",
        value_delimiter = ',',
        visible_alias = "authz-tokenreview-audiences"
    )]
    pub authz_token_audience: Vec<String>,
    /// How long the result of a successful token review is cached [default: 10s]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub authz_tokenreview_ttl: Option<Duration>,
    /// The largest number of cached token reviews [default: 20000]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    pub authz_tokenreview_cache_size: Option<u32>,
    /// How long a request waits for a sandbox that is unknown or not ready yet [default: 2s]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub resolve_wait: Option<Duration>,
}

impl ProxyArgs {
    /// Applies these flags to `config`. `variable` looks up an environment variable.
    pub fn apply(
        &self,
        config: &mut Config,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<(), ConfigError> {
        fn set<T: Copy>(setting: &mut T, flag: Option<T>) {
            if let Some(value) = flag {
                *setting = value;
            }
        }
        config.tls = self.tls()?;
        config.path_prefix = self.path_prefix()?;
        let from_environment = || proxy_timeout_from(variable("PROXY_TIMEOUT_SECONDS"));
        set(
            &mut config.proxy_timeout,
            self.proxy_timeout.or_else(from_environment),
        );
        let domain = self.cluster_domain.clone().filter(|name| !name.is_empty());
        if let Some(domain) = domain.or_else(|| cluster_domain_from(variable("CLUSTER_DOMAIN"))) {
            config.cluster_domain = domain;
        }
        config.response_header_timeout = self.response_header_timeout;
        set(&mut config.dial_retries, self.upstream_max_retries);
        set(
            &mut config.dial_retry_delay,
            self.upstream_retry_initial_delay,
        );
        set(
            &mut config.dial_retry_longest_delay,
            self.upstream_retry_max_delay,
        );
        set(&mut config.dial_timeout, self.upstream_dial_timeout);
        set(
            &mut config.max_request_body_bytes,
            self.max_request_body_bytes,
        );
        config.access_log = self.access_log;
        set(&mut config.shutdown_timeout, self.shutdown_timeout);
        set(&mut config.resolve_wait, self.resolve_wait);
        Ok(())
    }

    /// Authorization by TokenReview, with the options of these flags.
    pub fn token_review(&self) -> AuthorizationMode {
        let defaults = ReviewCache::default();
        let size = self.authz_tokenreview_cache_size;
        AuthorizationMode::TokenReview {
            audiences: self.authz_token_audience.clone(),
            cache: ReviewCache {
                lifetime: self.authz_tokenreview_ttl.unwrap_or(defaults.lifetime),
                size: size.map_or(defaults.size, |size| {
                    usize::try_from(size).unwrap_or(defaults.size)
                }),
            },
        }
    }

    fn path_prefix(&self) -> Result<Option<String>, ConfigError> {
        match self.path_routing_prefix.as_deref() {
            None | Some("") => Ok(self.path_routing.then(|| DEFAULT_PATH_PREFIX.to_owned())),
            Some(text) => {
                let prefix = parse_path_prefix(text).ok_or_else(|| ConfigError::Value {
                    flag: "path-routing-prefix",
                    value: text.to_owned(),
                    expected: "a path such as /sandbox",
                })?;
                Ok(Some(prefix))
            }
        }
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
}

fn needed(flag: &'static str, when: &'static str) -> ConfigError {
    ConfigError::Needed { flag, when }
}

pub(super) fn duration(text: &str) -> Result<Duration, &'static str> {
    parse_duration(text).ok_or("write a duration such as 30s")
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
