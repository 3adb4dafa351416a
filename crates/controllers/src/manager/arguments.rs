//! The command line of the controller process, in the spellings that existing deployments use.
//!
//! Go programs take flags with one dash or two, and booleans with or without a value. [`normalize`] and [`go_bool`] accept
//! all of these; everything else is ordinary.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;

use crate::config::{Config, RequestLimit};

/// More workers than this in total are worth a warning.
const MANY_WORKERS: usize = 1_000;

/// Run the controllers against a Kubernetes API.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a flag that existing deployments set"
)]
pub struct Args {
    /// Print the version and exit.
    #[arg(long = "version", id = "print-version", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set, hide_default_value = true, hide_possible_values = true)]
    pub version: bool,

    /// Kubeconfig to use; otherwise KUBECONFIG, or the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// DNS suffix of services, for status.serviceFQDN.
    #[arg(long, default_value = "cluster.local", value_name = "DOMAIN")]
    pub cluster_domain: String,

    /// Where to serve /metrics, and profiles when enabled; "0" serves none.
    #[arg(long, default_value = ":8080", value_name = "ADDRESS")]
    pub metrics_bind_address: String,

    /// Where to serve /healthz and /readyz; "0" serves none.
    #[arg(long, default_value = ":8081", value_name = "ADDRESS")]
    pub health_probe_bind_address: String,

    /// Run only while holding a lease, so that replicas can stand by.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = true, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub leader_elect: bool,

    /// Namespace of the lease; the pod's own unless set.
    #[arg(
        long,
        default_value = "",
        hide_default_value = true,
        value_name = "NAMESPACE"
    )]
    pub leader_election_namespace: String,

    /// Also run the controllers of SandboxClaim, SandboxTemplate and SandboxWarmPool.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub extensions: bool,

    /// Also run the controllers of the OpenKruise kinds: SandboxSet, and the SandboxClaim that claims many at once.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub kruise: bool,

    /// Adopt existing objects only if they are labelled agents.x-k8s.io/adoptable: "true".
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub require_adoptable_label: bool,

    /// Export traces by OTLP over gRPC, to where OTEL_EXPORTER_OTLP_ENDPOINT says.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub enable_tracing: bool,

    /// Serve /debug/pprof/profile beside the metrics.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub enable_pprof: bool,

    /// Serve all of /debug/pprof beside the metrics. May expose sensitive information.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub enable_pprof_debug: bool,

    /// Accepted for compatibility; this process has no block profile.
    #[arg(
        long,
        default_value_t = 1_000_000,
        allow_negative_numbers = true,
        value_name = "NANOSECONDS"
    )]
    pub pprof_block_profile_rate: i64,

    /// Accepted for compatibility; this process has no mutex profile.
    #[arg(
        long,
        default_value_t = 10,
        allow_negative_numbers = true,
        value_name = "FRACTION"
    )]
    pub pprof_mutex_profile_fraction: i64,

    /// Requests a second to the API server; zero or less does not limit them.
    #[arg(long, default_value_t = -1.0, allow_negative_numbers = true, value_name = "QPS")]
    pub kube_api_qps: f64,

    /// How many requests may be sent at once when they are limited.
    #[arg(long, default_value_t = NonZeroUsize::new(10).expect("ten is not zero"), value_parser = positive, allow_negative_numbers = true, value_name = "N")]
    pub kube_api_burst: NonZeroUsize,

    /// How many Sandboxes are reconciled at once.
    #[arg(long, default_value_t = Config::DEFAULT_SANDBOX_WORKERS, value_parser = positive, allow_negative_numbers = true, value_name = "N")]
    pub sandbox_concurrent_workers: NonZeroUsize,

    /// How many SandboxClaims are reconciled at once.
    #[arg(long, default_value_t = Config::DEFAULT_CLAIM_WORKERS, value_parser = positive, allow_negative_numbers = true, value_name = "N")]
    pub sandbox_claim_concurrent_workers: NonZeroUsize,

    /// How many SandboxWarmPools are reconciled at once.
    #[arg(long, default_value_t = Config::DEFAULT_WARM_POOL_WORKERS, value_parser = positive, allow_negative_numbers = true, value_name = "N")]
    pub sandbox_warm_pool_concurrent_workers: NonZeroUsize,

    /// How many SandboxTemplates are reconciled at once.
    #[arg(long, default_value_t = Config::DEFAULT_TEMPLATE_WORKERS, value_parser = positive, allow_negative_numbers = true, value_name = "N")]
    pub sandbox_template_concurrent_workers: NonZeroUsize,

    /// How many sandboxes a warm pool creates or deletes in one reconcile.
    #[arg(long, default_value_t = Config::DEFAULT_WARM_POOL_MAX_BATCH_SIZE, value_parser = positive, allow_negative_numbers = true, value_name = "N")]
    pub sandbox_warm_pool_max_batch_size: NonZeroUsize,

    /// How many sandboxes a SandboxClaim of the OpenKruise kind claims at a time.
    #[arg(long, default_value_t = Config::DEFAULT_BATCH_CLAIM_MAX_BATCH_SIZE, value_parser = positive, allow_negative_numbers = true, value_name = "N")]
    pub kruise_claim_max_batch_size: NonZeroUsize,

    #[command(flatten)]
    pub without_effect: WithoutEffect,

    #[command(flatten)]
    pub logging: super::logging::Args,
}

/// Flags of existing deployments that have no effect here. They are accepted with a warning.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct WithoutEffect {
    /// Accepted for compatibility; no version of an object needs a conversion webhook.
    #[arg(long, value_name = "PORT")]
    webhook_port: Option<u16>,

    /// Accepted for compatibility; there is no webhook.
    #[arg(long, value_name = "DIRECTORY")]
    webhook_cert_dir: Option<String>,

    /// Accepted for compatibility; there is no webhook.
    #[arg(long, value_name = "NAME")]
    webhook_service_name: Option<String>,

    /// Accepted for compatibility; there is no webhook.
    #[arg(long, value_name = "NAMESPACE")]
    webhook_namespace: Option<String>,

    /// Accepted for compatibility; pods of warm pools are not marked for eviction.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = go_bool, action = clap::ArgAction::Set)]
    enable_warm_pool_eviction: Option<bool>,
}

impl WithoutEffect {
    fn warning(&self) -> Option<String> {
        let given: Vec<&str> = [
            ("--webhook-port", self.webhook_port.is_some()),
            ("--webhook-cert-dir", self.webhook_cert_dir.is_some()),
            (
                "--webhook-service-name",
                self.webhook_service_name.is_some(),
            ),
            ("--webhook-namespace", self.webhook_namespace.is_some()),
            // `false` is what this process does, so it needs no warning.
            (
                "--enable-warm-pool-eviction",
                self.enable_warm_pool_eviction == Some(true),
            ),
        ]
        .into_iter()
        .filter_map(|(flag, is_given)| is_given.then_some(flag))
        .collect();
        (!given.is_empty()).then(|| {
            format!(
                "{} does nothing: there is no conversion webhook, and pods of warm pools are not marked for eviction",
                given.join(", ")
            )
        })
    }
}

impl Args {
    /// What the flags mean for the controllers.
    pub fn config(&self) -> Config {
        Config {
            extensions: self.extensions,
            kruise: self.kruise,
            cluster_domain: self.cluster_domain.clone(),
            sandbox_workers: self.sandbox_concurrent_workers,
            claim_workers: self.sandbox_claim_concurrent_workers,
            warm_pool_workers: self.sandbox_warm_pool_concurrent_workers,
            template_workers: self.sandbox_template_concurrent_workers,
            warm_pool_max_batch_size: self.sandbox_warm_pool_max_batch_size,
            batch_claim_max_batch_size: self.kruise_claim_max_batch_size,
            require_adoptable_label: self.require_adoptable_label,
            requests: (self.kube_api_qps > 0.0).then_some(RequestLimit {
                per_second: self.kube_api_qps,
                burst: self.kube_api_burst,
            }),
            unused_policy_grace: Config::UNUSED_POLICY_GRACE,
        }
    }

    /// What an operator should know about the combination of flags.
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let total: usize = [
            self.sandbox_concurrent_workers,
            self.sandbox_claim_concurrent_workers,
            self.sandbox_warm_pool_concurrent_workers,
            self.sandbox_template_concurrent_workers,
        ]
        .into_iter()
        .map(NonZeroUsize::get)
        .sum();
        if total > MANY_WORKERS {
            warnings.push(format!(
                "{total} workers in total may put excessive load on the API server"
            ));
        }
        if self.kube_api_qps > 0.0 && total > self.kube_api_burst.get() {
            warnings.push(format!(
                "{total} workers in total exceed --kube-api-burst={}: requests will be throttled",
                self.kube_api_burst
            ));
        }
        if self.enable_pprof_debug {
            warnings.push(
                "--enable-pprof-debug may expose sensitive information; --pprof-block-profile-rate and \
                 --pprof-mutex-profile-fraction do nothing, since this process has no such profiles"
                    .to_owned(),
            );
        }
        warnings.extend(self.without_effect.warning());
        warnings
    }
}

/// Gives flags that were written with one dash, as Go allows, their second.
pub fn normalize(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut flags_end = false;
    arguments
        .into_iter()
        .map(|argument| {
            let Some(text) = argument.to_str() else {
                return argument;
            };
            flags_end |= text == "--";
            let single = text.strip_prefix('-').filter(|rest| {
                let mut letters = rest.chars();
                let begins_a_word = letters
                    .next()
                    .is_some_and(|first| first.is_ascii_alphabetic());
                begins_a_word && letters.next().is_some()
            });
            match single {
                Some(rest) if !flags_end => OsString::from(format!("--{rest}")),
                _ => argument,
            }
        })
        .collect()
}

/// A boolean as Go's flags spell it.
fn go_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}

fn positive(text: &str) -> Result<NonZeroUsize, String> {
    let number: i64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    usize::try_from(number)
        .ok()
        .and_then(NonZeroUsize::new)
        .ok_or_else(|| "must be greater than 0".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Result<Args, clap::Error> {
        let words = line.split_whitespace().map(OsString::from);
        let words = std::iter::once(OsString::from("controller")).chain(words);
        Program::try_parse_from(normalize(words)).map(|program| program.args)
    }

    #[test]
    fn the_defaults_are_those_of_existing_deployments() {
        let args = parse("").unwrap();
        assert!(args.leader_elect);
        assert!(!args.extensions && !args.kruise && !args.enable_tracing);
        assert_eq!(args.cluster_domain, "cluster.local");
        assert_eq!(args.metrics_bind_address, ":8080");
        assert_eq!(args.health_probe_bind_address, ":8081");
        assert_eq!(args.leader_election_namespace, "");
        assert_eq!(
            (
                args.pprof_block_profile_rate,
                args.pprof_mutex_profile_fraction
            ),
            (1_000_000, 10)
        );
        assert_eq!(args.kube_api_burst.get(), 10);
        assert_eq!(args.sandbox_warm_pool_max_batch_size.get(), 300);
        assert_eq!(args.config().requests, None);
        assert_eq!(args.warnings(), Vec::<String>::new());
    }

    #[test]
    fn flags_are_accepted_in_every_spelling_of_go() {
        for (line, expected) in [
            ("--leader-elect", true),
            ("--leader-elect=true", true),
            ("--leader-elect=false", false),
            ("-leader-elect=f", false),
            ("-leader-elect", true),
            ("--leader-elect=0 --extensions", false),
        ] {
            assert_eq!(parse(line).unwrap().leader_elect, expected, "{line}");
        }
        let args = parse(
            "--leader-elect=true --extensions --sandbox-concurrent-workers=10 -sandbox-claim-concurrent-workers 20 \
             --kube-api-qps=50 --kube-api-burst=100 --pprof-block-profile-rate -1 -zap-log-level=debug",
        )
        .unwrap();
        assert!(args.extensions);
        assert_eq!(args.sandbox_concurrent_workers.get(), 10);
        assert_eq!(args.sandbox_claim_concurrent_workers.get(), 20);
        assert_eq!(args.pprof_block_profile_rate, -1);
        let limit = args.config().requests.unwrap();
        assert_eq!((limit.per_second, limit.burst.get()), (50.0, 100));
    }

    #[test]
    fn what_must_be_positive_is_refused_otherwise() {
        for flag in [
            "--sandbox-concurrent-workers",
            "--sandbox-claim-concurrent-workers",
            "--sandbox-warm-pool-concurrent-workers",
            "--sandbox-template-concurrent-workers",
            "--sandbox-warm-pool-max-batch-size",
            "--kruise-claim-max-batch-size",
            "--kube-api-burst",
        ] {
            for value in ["0", "-1", "many"] {
                assert!(parse(&format!("{flag}={value}")).is_err(), "{flag}={value}");
            }
        }
    }

    #[test]
    fn an_operator_is_warned_of_combinations_that_throttle() {
        let warnings = parse("--kube-api-qps=5").unwrap().warnings();
        assert!(
            warnings[0].contains("exceed --kube-api-burst=10"),
            "{warnings:?}"
        );
        let warnings = parse("--sandbox-concurrent-workers=2000")
            .unwrap()
            .warnings();
        assert!(warnings[0].contains("excessive load"), "{warnings:?}");
        assert_eq!(parse("--enable-pprof-debug").unwrap().warnings().len(), 1);
    }

    #[test]
    fn flags_that_mean_nothing_here_are_accepted_and_named() {
        let line = "--webhook-port=9443 --webhook-cert-dir=/certs --webhook-service-name s --webhook-namespace=n --enable-warm-pool-eviction";
        let warnings = parse(line).unwrap().warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        for flag in [
            "--webhook-port",
            "--webhook-namespace",
            "--enable-warm-pool-eviction",
        ] {
            assert!(warnings[0].contains(flag), "{flag}: {warnings:?}");
        }
        let quiet = parse("--enable-warm-pool-eviction=false").unwrap();
        assert!(quiet.warnings().is_empty());
    }
}
