//! `--config FILE`: flags from a YAML file whose keys are the names of flags. They are inserted before those of the command
//! line, which therefore take precedence.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use serde_yaml_ng::Value;

/// The environment variable that names the file if the flag is not given.
const VARIABLE: &str = "SANDBOX_ROUTER_CONFIG";

#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    #[error("cannot read the configuration in {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} is not a mapping of flags to values in YAML")]
    Malformed {
        path: PathBuf,
        #[source]
        source: serde_yaml_ng::Error,
    },
    #[error("{path}: the router has no flag --{key}")]
    Unknown { path: PathBuf, key: String },
    #[error(
        "{path}: the value of {key} is neither a string, a number, a boolean nor a list of these"
    )]
    Value { path: PathBuf, key: String },
}

/// Adds the flags of the file that `arguments` or the environment names. `arguments` begin with the program and the command.
pub fn with_config_file(
    arguments: Vec<OsString>,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Vec<OsString>, ConfigFileError> {
    const PROGRAM_AND_COMMAND: usize = 2;
    let named = flag_value(&arguments, "config").map(PathBuf::from);
    let path = named.or_else(|| variable(VARIABLE).map(PathBuf::from));
    let Some(path) = path.filter(|path| !path.as_os_str().is_empty()) else {
        return Ok(arguments);
    };
    let content = std::fs::read_to_string(&path).map_err(|source| ConfigFileError::Read {
        path: path.clone(),
        source,
    })?;
    let mut flags = flags_of(&path, &content)?;
    flags.retain(|(name, _)| !is_given(&arguments, name));
    let mut all = arguments;
    let at = all.len().min(PROGRAM_AND_COMMAND);
    all.splice(
        at..at,
        flags
            .into_iter()
            .map(|(name, value)| OsString::from(format!("--{name}={value}"))),
    );
    Ok(all)
}

/// The flags of a file, in command-line notation.
fn flags_of(path: &Path, content: &str) -> Result<Vec<(String, String)>, ConfigFileError> {
    let entries: Option<std::collections::BTreeMap<String, Value>> =
        serde_yaml_ng::from_str(content).map_err(|source| ConfigFileError::Malformed {
            path: path.to_owned(),
            source,
        })?;
    let known = known_flags();
    entries
        .unwrap_or_default()
        .into_iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(key, value)| {
            if !known.contains(&key) {
                let path = path.to_owned();
                return Err(ConfigFileError::Unknown { path, key });
            }
            match text_of(&value) {
                Some(text) => Ok((key, text)),
                None => Err(ConfigFileError::Value {
                    path: path.to_owned(),
                    key,
                }),
            }
        })
        .collect()
}

fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Bool(truth) => Some(truth.to_string()),
        Value::Number(number) => Some(number.to_string()),
        Value::Sequence(values) => {
            let texts: Option<Vec<String>> = values.iter().map(text_of).collect();
            Some(texts?.join(","))
        }
        _ => None,
    }
}

fn known_flags() -> Vec<String> {
    let command = <super::Args as clap::Args>::augment_args(clap::Command::new("router"));
    let names = command.get_arguments().flat_map(|argument| {
        let aliases = argument.get_all_aliases().unwrap_or_default();
        argument.get_long().into_iter().chain(aliases)
    });
    names.map(str::to_owned).collect()
}

/// Whether a command line contains a flag, with its value in the same argument or in the next.
fn is_given(arguments: &[OsString], name: &str) -> bool {
    arguments
        .iter()
        .any(|argument| after_flag(argument, name).is_some())
}

fn flag_value(arguments: &[OsString], name: &str) -> Option<OsString> {
    let at = arguments
        .iter()
        .rposition(|argument| after_flag(argument, name).is_some())?;
    match after_flag(arguments.get(at)?, name)?.strip_prefix('=') {
        Some(value) => Some(value.into()),
        None => arguments.get(at.checked_add(1)?).cloned(),
    }
}

/// The rest of an argument after a flag's name: empty, or `=` and the value.
fn after_flag<'a>(argument: &'a OsStr, name: &str) -> Option<&'a str> {
    let rest = argument.to_str()?.strip_prefix("--")?.strip_prefix(name)?;
    (rest.is_empty() || rest.starts_with('=')).then_some(rest)
}
