//! `agent-sandbox token`: tokens for one sandbox, for the router of `up` and for any other with `--authz-mode=scoped-token`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::Context;
use clap::Args;
use router::authorize::scoped_token::{Scope, TokenKey};

use crate::output::{parse_duration, print_text};
use crate::{data_directory, up};

/// Mint a token that opens one sandbox on some ports until a time
///
/// The router of `up` accepts it as `Authorization: Bearer …`; another does when it runs with --authz-mode=scoped-token and the same key,
/// or its public half.
#[derive(Debug, Args)]
pub struct Arguments {
    /// The key: a file with a secret of at least 32 bytes, or an Ed25519 private key as PEM [default: that of `up`, in its data
    /// directory]
    #[arg(long, value_name = "FILE", env = "AGENT_SANDBOX_TOKEN_KEY_FILE")]
    key_file: Option<PathBuf>,

    /// Namespace of the sandbox
    #[arg(short, long, default_value = "default")]
    namespace: String,

    /// Port that the token opens; may be repeated
    #[arg(short, long, value_name = "PORT", default_value = "8888", value_parser = clap::value_parser!(u16).range(1..))]
    port: Vec<u16>,

    /// How long the token is good for
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_duration)]
    expires_in: Duration,

    /// Name of the sandbox, as `agent-sandbox list` shows it
    sandbox: String,
}

pub fn print(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let key_file = match &arguments.key_file {
        Some(path) => path.clone(),
        None => up::token_key(&data_directory::default_path()?),
    };
    let described = || format!("cannot use the key in {}", key_file.display());
    let key = std::fs::read(&key_file).with_context(described)?;
    let key = TokenKey::parse(&key).with_context(described)?;
    for name in [&arguments.sandbox, &arguments.namespace] {
        name.parse::<api::names::ObjectName>()
            .with_context(|| format!("{name:?} is not a name"))?;
    }
    let scope = Scope::new(
        &arguments.namespace,
        &arguments.sandbox,
        &arguments.port,
        SystemTime::now(),
        arguments.expires_in,
    );
    print_text(&(key.mint(&scope).with_context(described)? + "\n"))?;
    Ok(ExitCode::SUCCESS)
}
