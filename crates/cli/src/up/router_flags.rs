//! The router's own flags as `up` takes them: `--router-proxy-timeout` is `agent-sandbox router --proxy-timeout`, and so on.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context;
use clap::builder::Resettable;
use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches};
use router::{AuthorizationMode, ProxyArgs};

const PREFIX: &str = "router-";

/// Flags that change how the router of `up` proxies.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct RouterFlags {
    /// Where the router serves HTTPS, once --router-tls-cert-file names a certificate
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8443")]
    pub router_https_listen: SocketAddr,

    #[command(flatten)]
    pub proxy: Prefixed,
}

impl RouterFlags {
    pub fn has_https(&self) -> bool {
        self.proxy.0.tls_cert_file.is_some()
    }

    /// How the router of `up` works.
    pub fn config(
        &self,
        host_domains: Vec<String>,
        authorization: AuthorizationMode,
    ) -> anyhow::Result<router::Config> {
        let mut config = router::Config {
            host_domains,
            authorization,
            tunnels: true,
            ..router::Config::default()
        };
        self.proxy
            .0
            .apply(&mut config, |name| std::env::var(name).ok())
            .context("a flag of the router's, which begins with --router- here")?;
        Ok(config)
    }
}

impl Default for RouterFlags {
    /// HTTPS on a free port, if there is a certificate.
    fn default() -> Self {
        Self {
            router_https_listen: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0),
            proxy: Prefixed::default(),
        }
    }
}

/// The flags that the router shares with `up`, each with a prefix.
#[derive(Clone, Debug, Default)]
pub struct Prefixed(pub ProxyArgs);

impl Args for Prefixed {
    fn augment_args(command: Command) -> Command {
        let flags = ProxyArgs::augment_args(Command::new("router"));
        command.args(flags.get_arguments().cloned().map(prefixed))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Prefixed {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        ProxyArgs::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }
}

/// The flag under its prefixed names. These live as long as the process, as `clap` wants them.
fn prefixed(flag: Arg) -> Arg {
    let name = |name: &str| -> &'static str { format!("{PREFIX}{name}").leak() };
    let aliases = flag.get_visible_aliases().unwrap_or_default();
    let aliases: Vec<&'static str> = aliases.into_iter().map(name).collect();
    let long = flag.get_long().map(name);
    let flag = flag.visible_alias(Resettable::Reset);
    match long {
        Some(long) => flag.long(long).visible_aliases(aliases),
        None => flag,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flags: RouterFlags,
    }

    fn parse(words: &[&str]) -> Result<router::Config, String> {
        let words = std::iter::once("up").chain(words.iter().copied());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        let mut config = router::Config::default();
        let applied = line.flags.proxy.0.apply(&mut config, |_| None);
        applied.map_err(|error| error.to_string())?;
        Ok(config)
    }

    #[test]
    fn up_takes_the_routers_flags_with_a_prefix() {
        assert_eq!(parse(&[]).unwrap(), router::Config::default());
        let config = parse(&[
            "--router-proxy-timeout=10s",
            "--router-access-log",
            "--router-max-request-body-bytes=7",
            "--router-tls-cert-file=c",
            "--router-tls-key-file=k",
            "--router-path-routing",
            "--router-authz-tokenreview-audiences=a",
        ])
        .unwrap();
        assert_eq!(config.proxy_timeout, Duration::from_secs(10));
        assert_eq!(config.max_request_body_bytes, 7);
        assert!(config.access_log && config.tls.is_some());
        assert_eq!(config.path_prefix.as_deref(), Some("/sandbox"));
        for unprefixed in ["--proxy-timeout=10s", "--authz-tokenreview-audiences=a"] {
            assert!(parse(&[unprefixed]).is_err(), "{unprefixed}");
        }
        let error = parse(&["--router-proxy-timeout=never"]).unwrap_err();
        assert!(error.contains("--router-proxy-timeout"), "{error}");
    }
}
