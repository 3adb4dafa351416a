//! Upstream's router flags that have no effect here. They are accepted, so that a deployment written for upstream starts. A
//! warning names each flag that asks for something this router does not do.

use std::fmt;
use std::path::PathBuf;

use clap::builder::BoolishValueParser;

/// Upstream's flags without an effect.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub struct UpstreamArgs {
    /// The router always watches sandboxes if it may
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub cache_enabled: Option<bool>,
    /// Metrics are served at --metrics-bind-address
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub enable_otel_metrics: Option<bool>,
    /// `X-Sandbox-Pod-IP` is never dialled
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub allow_loopback_pod_ip: Option<bool>,
    /// A token is always required
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub authz_tokenreview_require_token: Option<bool>,
    #[arg(long, hide = true, value_name = "FILE")]
    pub authz_scoped_token_verification_keys_file: Option<PathBuf>,
    #[arg(long, hide = true, value_name = "NAME")]
    pub authz_cookie_name: Option<String>,
    #[arg(long, hide = true, value_name = "NAME")]
    pub authz_cookie_query_param: Option<String>,
    #[arg(long, hide = true, value_name = "MODE")]
    pub authz_cookie_samesite: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub authz_cookie_insecure: Option<bool>,
    #[arg(long, hide = true, value_name = "ORIGINS")]
    pub authz_cookie_allowed_origins: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new())]
    pub authz_trust_forwarded_proto: Option<bool>,
    #[arg(long, hide = true, value_name = "NAME")]
    pub config_configmap_name: Option<String>,
}

/// A flag that was given and has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ignored {
    pub flag: &'static str,
    pub reason: &'static str,
}

impl fmt::Display for Ignored {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "--{} has no effect: {}", self.flag, self.reason)
    }
}

impl UpstreamArgs {
    /// The flags that ask for something the router does not do. Flags for what the router does anyway are not included.
    pub fn ignored(&self) -> Vec<Ignored> {
        const NO_COOKIE: &str =
            "the router takes a token from the cookie sandbox_token, and sets no cookie itself";
        let given = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        [
            (
                "cache-enabled",
                self.cache_enabled == Some(false),
                "the router watches sandboxes if it may, and uses DNS only if it may not",
            ),
            (
                "enable-otel-metrics",
                self.enable_otel_metrics == Some(true),
                "metrics are not pushed; scrape /metrics at --metrics-bind-address",
            ),
            (
                "allow-loopback-pod-ip",
                self.allow_loopback_pod_ip == Some(true),
                "the router dials the address that the API reports, never that of X-Sandbox-Pod-IP",
            ),
            (
                "authz-tokenreview-require-token",
                self.authz_tokenreview_require_token == Some(false),
                "with --authz-mode=tokenreview a request without a token is always refused",
            ),
            (
                "authz-scoped-token-verification-keys-file",
                self.authz_scoped_token_verification_keys_file.is_some(),
                "scoped tokens are checked with the key of --scoped-token-key-file",
            ),
            ("authz-cookie-name", given(&self.authz_cookie_name), NO_COOKIE),
            (
                "authz-cookie-query-param",
                given(&self.authz_cookie_query_param),
                NO_COOKIE,
            ),
            (
                "authz-cookie-samesite",
                given(&self.authz_cookie_samesite),
                NO_COOKIE,
            ),
            (
                "authz-cookie-insecure",
                self.authz_cookie_insecure == Some(true),
                NO_COOKIE,
            ),
            (
                "authz-cookie-allowed-origins",
                given(&self.authz_cookie_allowed_origins),
                "sandboxes check the origin of requests, by the header Sec-Fetch-Site that the router sets",
            ),
            (
                "authz-trust-forwarded-proto",
                self.authz_trust_forwarded_proto == Some(true),
                "the router checks no origin by X-Forwarded-Proto",
            ),
            (
                "config-configmap-name",
                given(&self.config_configmap_name),
                "the router reads no ConfigMap; mount it as a file and name that with --config",
            ),
        ]
        .into_iter()
        .filter(|(_, asked, _)| *asked)
        .map(|(flag, _, reason)| Ignored { flag, reason })
        .collect()
    }
}
