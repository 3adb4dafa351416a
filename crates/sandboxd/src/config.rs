//! The server's configuration, from environment variables and flags. Parsing is pure; flags take precedence.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// The help text of the small binary.
pub const USAGE: &str = "\
sandboxd: runs commands and transfers files inside a sandbox

Usage: sandboxd [FLAGS]

  --base-dir DIR              directory of files and commands         [/app]          SANDBOX_BASE_DIR
  --listen ADDRESS            the SDK API; may be repeated            [0.0.0.0:8888]  SANDBOX_LISTEN
  --init-listen ADDRESS|none  the initialisation port                 [0.0.0.0:49983] SANDBOX_INIT_LISTEN
  --rest-listen ADDRESS|none  the newer API's files (port 8080)       [none]          SANDBOX_REST_LISTEN
  --grpc-listen ADDRESS|none  the newer API's processes (port 9090)   [none]          SANDBOX_GRPC_LISTEN
  --exec-timeout SECONDS      time limit of a command                 [300]           SANDBOX_EXEC_TIMEOUT_SECONDS
  --max-output-bytes BYTES    limit of each collected output stream   [16777216]      SANDBOX_MAX_OUTPUT_BYTES
  --shutdown-grace SECONDS    time for running commands after SIGTERM [10]            SANDBOX_SHUTDOWN_GRACE_SECONDS
  --log-format text|json      format of log lines on standard error   [text]          SANDBOX_LOG_FORMAT
  --help, --version

The address 0.0.0.0 means every address of the machine, including IPv6.
";

/// The server's configuration. [`Config::default`] applies without flags and variables.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The directory of files and commands; created if it is missing.
    pub base_dir: PathBuf,
    /// The addresses of the SDK API.
    pub listen: Vec<SocketAddr>,
    /// The address of `POST /init`. A port in use is a warning, not an error: a sandbox works without it.
    pub init_listen: Option<SocketAddr>,
    /// The address of the newer runtime API for files.
    pub rest_listen: Option<SocketAddr>,
    /// The address of the newer runtime API for processes, over gRPC.
    pub grpc_listen: Option<SocketAddr>,
    /// The default time limit of a command.
    pub exec_timeout: Duration,
    /// How many bytes of each output stream of a command are collected.
    pub max_output_bytes: usize,
    /// How long running commands and requests may take after the server is asked to stop.
    pub shutdown_grace: Duration,
    /// The format of log lines on standard error.
    pub log_format: LogFormat,
    /// Reap orphaned processes as well. Only for a process that starts all its children through the server.
    pub reap_orphans: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            base_dir: PathBuf::from("/app"),
            listen: vec![SocketAddr::from(([0, 0, 0, 0], 8888))],
            init_listen: Some(SocketAddr::from(([0, 0, 0, 0], 49983))),
            rest_listen: None,
            grpc_listen: None,
            exec_timeout: Duration::from_secs(300),
            max_output_bytes: 16 * 1024 * 1024,
            shutdown_grace: Duration::from_secs(10),
            log_format: LogFormat::Text,
            reap_orphans: true,
        }
    }
}

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    /// One JSON object per line.
    Json,
}

impl FromStr for LogFormat {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(()),
        }
    }
}

/// The meaning of a command line.
#[derive(Clone, Debug, PartialEq)]
pub enum Invocation {
    Run(Box<Config>),
    Help,
    Version,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{name} has the value {value:?}, which is not {expected}")]
    Value {
        name: String,
        value: String,
        expected: &'static str,
    },
    #[error("{0} needs a value")]
    Missing(String),
    #[error("unknown flag {0}; --help lists the flags")]
    Unknown(String),
}

impl Config {
    /// The defaults, changed by environment variables. `variable` looks one up.
    pub fn from_environment(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        for (_, setting) in SETTINGS {
            let variable_name = setting.variable();
            if let Some(value) = variable(variable_name).filter(|value| !value.is_empty()) {
                setting.apply(&mut config, variable_name, &value)?;
            }
        }
        Ok(config)
    }

    /// Parses a command line (without the program's name) on top of the environment.
    pub fn parse(
        arguments: impl IntoIterator<Item = String>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Invocation, ConfigError> {
        let mut config = Self::from_environment(variable)?;
        let mut arguments = arguments.into_iter();
        let mut listen = Vec::new();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--help" | "-h" => return Ok(Invocation::Help),
                "--version" | "-V" => return Ok(Invocation::Version),
                _ => {}
            }
            let (flag, inline) = match argument.split_once('=') {
                Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
                None => (argument, None),
            };
            let setting = SETTINGS
                .iter()
                .find(|(name, _)| *name == flag)
                .map(|(_, setting)| *setting);
            let setting = setting.ok_or_else(|| ConfigError::Unknown(flag.clone()))?;
            let value = inline
                .or_else(|| arguments.next())
                .ok_or_else(|| ConfigError::Missing(flag.clone()))?;
            setting.apply(&mut config, &flag, &value)?;
            if setting == Setting::Listen {
                listen.append(&mut config.listen);
                config.listen.clone_from(&listen);
            }
        }
        Ok(Invocation::Run(Box::new(config)))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setting {
    BaseDir,
    Listen,
    InitListen,
    RestListen,
    GrpcListen,
    ExecTimeout,
    MaxOutputBytes,
    ShutdownGrace,
    LogFormat,
}

const SETTINGS: &[(&str, Setting)] = &[
    ("--base-dir", Setting::BaseDir),
    ("--listen", Setting::Listen),
    ("--init-listen", Setting::InitListen),
    ("--rest-listen", Setting::RestListen),
    ("--grpc-listen", Setting::GrpcListen),
    ("--exec-timeout", Setting::ExecTimeout),
    ("--max-output-bytes", Setting::MaxOutputBytes),
    ("--shutdown-grace", Setting::ShutdownGrace),
    ("--log-format", Setting::LogFormat),
];

impl Setting {
    fn variable(self) -> &'static str {
        match self {
            Setting::BaseDir => "SANDBOX_BASE_DIR",
            Setting::Listen => "SANDBOX_LISTEN",
            Setting::InitListen => "SANDBOX_INIT_LISTEN",
            Setting::RestListen => "SANDBOX_REST_LISTEN",
            Setting::GrpcListen => "SANDBOX_GRPC_LISTEN",
            Setting::ExecTimeout => "SANDBOX_EXEC_TIMEOUT_SECONDS",
            Setting::MaxOutputBytes => "SANDBOX_MAX_OUTPUT_BYTES",
            Setting::ShutdownGrace => "SANDBOX_SHUTDOWN_GRACE_SECONDS",
            Setting::LogFormat => "SANDBOX_LOG_FORMAT",
        }
    }

    fn apply(self, config: &mut Config, name: &str, value: &str) -> Result<(), ConfigError> {
        match self {
            Setting::BaseDir => config.base_dir = PathBuf::from(value),
            Setting::Listen => {
                let addresses = value
                    .split(',')
                    .map(|address| parse(name, address.trim(), "an address with a port"));
                config.listen = addresses.collect::<Result<_, _>>()?;
            }
            Setting::InitListen => config.init_listen = optional_address(name, value)?,
            Setting::RestListen => config.rest_listen = optional_address(name, value)?,
            Setting::GrpcListen => config.grpc_listen = optional_address(name, value)?,
            Setting::ExecTimeout => config.exec_timeout = seconds(name, value)?,
            Setting::MaxOutputBytes => {
                config.max_output_bytes = parse(name, value, "a number of bytes")?;
            }
            Setting::ShutdownGrace => config.shutdown_grace = seconds(name, value)?,
            Setting::LogFormat => config.log_format = parse(name, value, "text or json")?,
        }
        Ok(())
    }
}

fn optional_address(name: &str, value: &str) -> Result<Option<SocketAddr>, ConfigError> {
    if value == "none" {
        Ok(None)
    } else {
        parse(name, value, "an address with a port, or none").map(Some)
    }
}

fn seconds(name: &str, value: &str) -> Result<Duration, ConfigError> {
    let expected = "a positive number of seconds";
    let number: f64 = parse(name, value, expected)?;
    crate::session::time_limit(number).ok_or_else(|| invalid(name, value, expected))
}

fn parse<T: FromStr>(name: &str, value: &str, expected: &'static str) -> Result<T, ConfigError> {
    value.parse().map_err(|_| invalid(name, value, expected))
}

fn invalid(name: &str, value: &str, expected: &'static str) -> ConfigError {
    ConfigError::Value {
        name: name.to_owned(),
        value: value.to_owned(),
        expected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Invocation, ConfigError> {
        let variable = |wanted: &str| {
            environment
                .iter()
                .find(|(name, _)| *name == wanted)
                .map(|(_, value)| (*value).to_owned())
        };
        Config::parse(
            arguments.iter().map(|argument| (*argument).to_owned()),
            variable,
        )
    }

    fn config(arguments: &[&str], environment: &[(&str, &str)]) -> Config {
        match parsed(arguments, environment).unwrap() {
            Invocation::Run(config) => *config,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn no_flags_mean_the_published_defaults() {
        let config = config(&[], &[]);
        assert_eq!(config, Config::default());
        assert_eq!(config.base_dir, PathBuf::from("/app"));
        assert_eq!(config.exec_timeout, Duration::from_secs(300));
    }

    #[test]
    fn flags_override_the_environment() {
        let environment = [
            ("SANDBOX_BASE_DIR", "/env"),
            ("SANDBOX_EXEC_TIMEOUT_SECONDS", "7.5"),
        ];
        let config = config(
            &[
                "--base-dir=/flag",
                "--listen",
                "127.0.0.1:1",
                "--listen",
                "[::1]:2",
                "--init-listen",
                "none",
            ],
            &environment,
        );
        assert_eq!(config.base_dir, PathBuf::from("/flag"));
        assert_eq!(config.exec_timeout, Duration::from_millis(7500));
        assert_eq!(
            config.listen,
            ["127.0.0.1:1".parse().unwrap(), "[::1]:2".parse().unwrap()]
        );
        assert_eq!(config.init_listen, None);
    }

    #[test]
    fn invalid_values_name_the_flag_or_variable() {
        assert_eq!(
            parsed(&["--nonsense"], &[]),
            Err(ConfigError::Unknown("--nonsense".into()))
        );
        assert_eq!(
            parsed(&["--base-dir"], &[]),
            Err(ConfigError::Missing("--base-dir".into()))
        );
        let error = parsed(&[], &[("SANDBOX_EXEC_TIMEOUT_SECONDS", "-1")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "SANDBOX_EXEC_TIMEOUT_SECONDS has the value \"-1\", which is not a positive number of seconds"
        );
        assert_eq!(parsed(&["--help"], &[]), Ok(Invocation::Help));
    }
}
