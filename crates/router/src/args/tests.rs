use std::ffi::OsString;
use std::time::Duration;

use clap::Parser;

use super::*;
use crate::config::{MutualTls, ReviewCache};

#[derive(Parser)]
#[command(args_override_self = true)]
struct Line {
    #[command(flatten)]
    args: Args,
}

fn parse(arguments: &[&str]) -> Result<Args, clap::Error> {
    let words = std::iter::once("router").chain(arguments.iter().copied());
    Line::try_parse_from(words).map(|line| line.args)
}

fn config(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
    parse(arguments).unwrap().into_config(|wanted| {
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
fn upstreams_flags_set_the_configuration() {
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

/// The effect of an upstream flag here.
enum Effect {
    /// It changes the configuration.
    Config(fn(&mut Config)),
    /// None: the router does this in any case, or the flag is read before the configuration is built.
    Silent,
    /// A warning says that it has no effect.
    Warned,
}

/// Every flag of upstream's router (`sandbox-router/config/flags.go`), with a value.
const UPSTREAM: &[(&str, Effect)] = &[
    (
        "--http-bind-address=:1",
        Effect::Config(|config| config.http_listen = ListenAddress::Any(1)),
    ),
    (
        "--https-bind-address=:1",
        Effect::Config(|config| config.https_listen = ListenAddress::Any(1)),
    ),
    (
        "--https-bind-address=",
        Effect::Config(|config| config.https_listen = ListenAddress::Off),
    ),
    (
        "--metrics-bind-address=:1",
        Effect::Config(|config| config.metrics_listen = ListenAddress::Any(1)),
    ),
    (
        "--health-probe-bind-address=:1",
        Effect::Config(|config| config.health_listen = ListenAddress::Any(1)),
    ),
    ("--mtls-mode=off", Effect::Silent),
    (
        "--cluster-domain=x.y",
        Effect::Config(|config| config.cluster_domain = "x.y".into()),
    ),
    (
        "--proxy-timeout=10s",
        Effect::Config(|config| config.proxy_timeout = Duration::from_secs(10)),
    ),
    (
        "--response-header-timeout=10s",
        Effect::Config(|config| config.response_header_timeout = Some(Duration::from_secs(10))),
    ),
    (
        "--shutdown-timeout=10s",
        Effect::Config(|config| config.shutdown_timeout = Duration::from_secs(10)),
    ),
    (
        "--max-request-body-bytes=10",
        Effect::Config(|config| config.max_request_body_bytes = 10),
    ),
    ("--allow-loopback-pod-ip", Effect::Warned),
    ("--allow-loopback-pod-ip=false", Effect::Silent),
    (
        "--path-routing-prefix=/boxes/",
        Effect::Config(|config| config.path_prefix = Some("/boxes".into())),
    ),
    ("--path-routing-prefix=", Effect::Silent),
    (
        "--upstream-max-retries=1",
        Effect::Config(|config| config.dial_retries = 1),
    ),
    (
        "--upstream-retry-initial-delay=10ms",
        Effect::Config(|config| config.dial_retry_delay = Duration::from_millis(10)),
    ),
    (
        "--upstream-retry-max-delay=10s",
        Effect::Config(|config| config.dial_retry_longest_delay = Duration::from_secs(10)),
    ),
    ("--enable-tracing=true", Effect::Silent),
    ("--enable-otel-metrics", Effect::Warned),
    ("--enable-otel-metrics=0", Effect::Silent),
    ("--authz-mode=allow-all", Effect::Silent),
    (
        "--authz-mode=tokenreview",
        Effect::Config(|config| {
            config.authorization = AuthorizationMode::TokenReview {
                audiences: Vec::new(),
                cache: ReviewCache::default(),
            };
        }),
    ),
    ("--authz-tokenreview-ttl=1m", Effect::Silent),
    ("--authz-tokenreview-cache-size=7", Effect::Silent),
    ("--authz-tokenreview-require-token", Effect::Silent),
    ("--authz-tokenreview-require-token=false", Effect::Warned),
    ("--authz-tokenreview-audiences=a,b", Effect::Silent),
    ("--authz-scoped-token-secret-file=f", Effect::Silent),
    (
        "--authz-scoped-token-verification-keys-file=f",
        Effect::Warned,
    ),
    ("--authz-cookie-name=c", Effect::Warned),
    ("--authz-cookie-name=", Effect::Silent),
    ("--authz-cookie-query-param=q", Effect::Warned),
    ("--authz-cookie-samesite=lax", Effect::Warned),
    ("--authz-cookie-insecure", Effect::Warned),
    (
        "--authz-cookie-allowed-origins=https://a.example",
        Effect::Warned,
    ),
    ("--authz-trust-forwarded-proto", Effect::Warned),
    ("--cache-enabled", Effect::Silent),
    ("--cache-enabled=false", Effect::Warned),
    (
        "--cache-namespace=team",
        Effect::Config(|config| config.watch_namespace = Some("team".into())),
    ),
    ("--cache-namespace=", Effect::Silent),
    ("--kubeconfig=f", Effect::Silent),
    (
        "--access-log=true",
        Effect::Config(|config| config.access_log = true),
    ),
    ("--access-log=false", Effect::Silent),
    ("--version", Effect::Silent),
    ("--config=f", Effect::Silent),
    ("--config-configmap-name=m", Effect::Warned),
];

#[test]
fn every_flag_of_upstreams_router_is_honoured_or_warned_about() {
    for (flag, effect) in UPSTREAM {
        let args = parse(&[flag]).unwrap_or_else(|error| panic!("{flag}: {error}"));
        let warnings: Vec<String> = args
            .upstream
            .ignored()
            .iter()
            .map(Ignored::to_string)
            .collect();
        let mut expected = Config::default();
        if let Effect::Config(change) = effect {
            change(&mut expected);
            assert_ne!(
                expected,
                Config::default(),
                "{flag}: the table says that it changes something"
            );
        }
        assert_eq!(args.into_config(|_| None).unwrap(), expected, "{flag}");
        let name = flag.split('=').next().unwrap();
        if matches!(effect, Effect::Warned) {
            assert_eq!(warnings.len(), 1, "{flag}: {warnings:?}");
            assert!(
                warnings[0].starts_with(&format!("{name} has no effect: ")),
                "{warnings:?}"
            );
        } else {
            assert_eq!(warnings, Vec::<String>::new(), "{flag}");
        }
    }
}

#[test]
fn flags_set_the_audiences_and_the_cache_of_token_reviews() {
    let flags = [
        "--authz-mode=tokenreview",
        "--authz-tokenreview-ttl=1m",
        "--authz-tokenreview-cache-size=7",
        "--authz-tokenreview-audiences=a,b",
    ];
    assert_eq!(
        config(&flags, &[]).unwrap().authorization,
        AuthorizationMode::TokenReview {
            audiences: vec!["a".into(), "b".into()],
            cache: ReviewCache {
                lifetime: Duration::from_secs(60),
                size: 7
            },
        }
    );
    let flags = [
        "--authz-mode=scoped-token",
        "--authz-scoped-token-secret-file=f",
    ];
    let key_file = "f".into();
    assert_eq!(
        config(&flags, &[]).unwrap().authorization,
        AuthorizationMode::ScopedToken { key_file }
    );
}

#[test]
fn invalid_environment_variables_leave_the_default() {
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
fn flags_that_require_another_are_refused_without_it() {
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
}

#[test]
fn an_invalid_value_is_refused_with_its_flag() {
    let error = parse(&["--proxy-timeout=never"]).unwrap_err().to_string();
    assert!(error.contains("--proxy-timeout"), "{error}");
    for prefix in ["boxes", "/", "/a//b", "/a?b", "/a b"] {
        let flag = format!("--path-routing-prefix={prefix}");
        let error = config(&[&flag], &[]).unwrap_err().to_string();
        assert!(error.contains("path-routing-prefix"), "{prefix}: {error}");
    }
}

fn with_file(content: &str, arguments: &[&str]) -> Result<Vec<String>, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), content).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    let arguments = ["sandbox-router", "router"]
        .iter()
        .chain(arguments)
        .map(OsString::from)
        .collect();
    let variable = |name: &str| (name == "SANDBOX_ROUTER_CONFIG").then(|| path.clone());
    match with_config_file(arguments, variable) {
        Ok(words) => Ok(words
            .into_iter()
            .skip(2)
            .map(|word| word.into_string().unwrap())
            .collect()),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn flags_of_the_command_line_override_those_of_a_file() {
    let content = "proxy-timeout: 5s\naccess-log: true\nupstream-max-retries: 7\nauthz-tokenreview-audiences: [a, b]\n";
    assert_eq!(
        with_file(
            content,
            &["--upstream-max-retries", "1", "--proxy-timeout=9s"]
        )
        .unwrap(),
        [
            "--access-log=true",
            "--authz-tokenreview-audiences=a,b",
            "--upstream-max-retries",
            "1",
            "--proxy-timeout=9s"
        ]
    );
    assert_eq!(with_file("", &["--access-log"]).unwrap(), ["--access-log"]);
}

#[test]
fn an_invalid_file_is_refused_with_the_reason() {
    let error = with_file("proxy-timeot: 5s", &[]).unwrap_err();
    assert!(
        error.ends_with("the router has no flag --proxy-timeot"),
        "{error}"
    );
    let error = with_file("- a", &[]).unwrap_err();
    assert!(error.contains("is not a mapping"), "{error}");
    let error = with_file("proxy-timeout: {a: b}", &[]).unwrap_err();
    assert!(error.contains("proxy-timeout"), "{error}");
    let missing = vec![
        "a".into(),
        "router".into(),
        "--config=/does/not/exist".into(),
    ];
    let error = with_config_file(missing, |_| None).unwrap_err().to_string();
    assert!(error.contains("/does/not/exist"), "{error}");
}
