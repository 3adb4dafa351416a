//! The router's command line, with upstream's flag names, and the environment variables of upstream's first releases.
//!
//! [`ProxyArgs`] is shared with `agent-sandbox up`. [`UpstreamArgs`] are upstream's flags that have no effect here.

mod config_file;
mod proxy;
mod upstream;

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use crate::config::{AuthorizationMode, Config, ConfigError, ListenAddress};

pub use config_file::{ConfigFileError, with_config_file};
pub use proxy::ProxyArgs;
pub use upstream::{Ignored, UpstreamArgs};

/// Which clients may use a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AuthzMode {
    #[value(alias = "allow-all")]
    None,
    #[value(name = "tokenreview")]
    TokenReview,
    #[value(name = "scoped-token")]
    ScopedToken,
}

/// Flags of the router.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Args {
    /// A YAML file of flags: names without the dashes, and their values. Flags on the command line take precedence [env: SANDBOX_ROUTER_CONFIG]
    // Read by `with_config_file`, before the command line is parsed.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kubeconfig to use; otherwise KUBECONFIG, or the pod's service account
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Address for HTTP/1.1 and HTTP/2 without TLS; empty or 0 disables it
    #[arg(long, value_name = "ADDRESS", default_value = ":8080")]
    pub http_bind_address: String,
    /// Address for HTTPS, used if a certificate is given
    #[arg(long, value_name = "ADDRESS", default_value = ":8443")]
    pub https_bind_address: String,
    /// Address for /metrics; 0 disables it
    #[arg(long, value_name = "ADDRESS", default_value = ":9090")]
    pub metrics_bind_address: String,
    /// Address for /healthz and /readyz; 0 disables it
    #[arg(long, value_name = "ADDRESS", default_value = ":8081")]
    pub health_probe_bind_address: String,
    /// Export traces by OTLP over gRPC to OTEL_EXPORTER_OTLP_ENDPOINT
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new(), action = clap::ArgAction::Set)]
    pub enable_tracing: bool,
    /// How long the router still accepts connections after SIGTERM, while /readyz already fails [default: 0s]
    #[arg(long, value_name = "DURATION", value_parser = proxy::duration)]
    pub shutdown_delay: Option<Duration>,
    /// Route <port>-<sandbox>.<domain> and <port>-<namespace>--<sandbox>.<domain>; may be repeated
    #[arg(long, value_name = "DOMAIN", value_delimiter = ',')]
    pub host_domain: Vec<String>,
    /// Watch sandboxes of this namespace only, if the router may not watch all
    #[arg(long, value_name = "NAMESPACE")]
    pub cache_namespace: Option<String>,
    /// Which clients may use a sandbox
    #[arg(long, value_enum, value_name = "MODE", default_value = "none")]
    pub authz_mode: AuthzMode,
    /// The key of scoped tokens: a secret of at least 32 bytes, or an Ed25519 key as PEM
    #[arg(
        long,
        value_name = "FILE",
        visible_alias = "authz-scoped-token-secret-file"
    )]
    pub scoped_token_key_file: Option<PathBuf>,
    /// Print the version and exit
    #[arg(long = "version", id = "print-version", num_args = 0..=1, require_equals = true, default_value_t = false, default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new(), action = clap::ArgAction::Set, hide_default_value = true, hide_possible_values = true)]
    pub version: bool,
    #[command(flatten)]
    pub proxy: ProxyArgs,
    #[command(flatten)]
    pub upstream: UpstreamArgs,
}

impl Args {
    /// The configuration that these flags mean. `variable` looks up an environment variable; an invalid value there is ignored
    /// with a warning, as in upstream's first releases, while an invalid flag is an error.
    pub fn into_config(
        self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Config, ConfigError> {
        let mut config = Config {
            http_listen: address("http-bind-address", &self.http_bind_address)?,
            https_listen: address("https-bind-address", &self.https_bind_address)?,
            metrics_listen: address("metrics-bind-address", &self.metrics_bind_address)?,
            health_listen: address("health-probe-bind-address", &self.health_probe_bind_address)?,
            authorization: self.authorization()?,
            shutdown_delay: self.shutdown_delay.unwrap_or_default(),
            host_domains: self
                .host_domain
                .iter()
                .map(|domain| domain.to_ascii_lowercase())
                .collect(),
            watch_namespace: self
                .cache_namespace
                .filter(|namespace| !namespace.is_empty()),
            ..Config::default()
        };
        self.proxy.apply(&mut config, variable)?;
        Ok(config)
    }

    fn authorization(&self) -> Result<AuthorizationMode, ConfigError> {
        match self.authz_mode {
            AuthzMode::None => Ok(AuthorizationMode::None),
            AuthzMode::TokenReview => Ok(self.proxy.token_review()),
            AuthzMode::ScopedToken => {
                let key_file = self.scoped_token_key_file.clone();
                let key_file = key_file.ok_or(ConfigError::Needed {
                    flag: "scoped-token-key-file",
                    when: "with --authz-mode=scoped-token",
                })?;
                Ok(AuthorizationMode::ScopedToken { key_file })
            }
        }
    }
}

fn address(flag: &'static str, text: &str) -> Result<ListenAddress, ConfigError> {
    let expected = "an address such as :8080";
    ListenAddress::parse(text).ok_or_else(|| ConfigError::Value {
        flag,
        value: text.to_owned(),
        expected,
    })
}

#[cfg(test)]
mod tests;
