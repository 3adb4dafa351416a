//! The data directory of `up`, and how other commands find a running `up` in it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// The file in the data directory with the addresses of a running `up`.
const RUNNING: &str = "up.json";

/// The addresses of a running `up`. The ready file has the same content.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Running {
    pub kubeconfig: PathBuf,
    pub api_server: String,
    /// Absent where the router does not run.
    pub router: Option<String>,
    /// Where the router serves HTTPS, if it has a certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_https: Option<String>,
    pub metrics: String,
    pub namespace: String,
    pub template: Option<String>,
    pub warm_pool: Option<String>,
    /// The parts that do not run.
    #[serde(default)]
    pub disabled: Vec<String>,
    pub pid: u32,
}

impl Running {
    /// Writes the file so that a reader sees all of it or nothing.
    pub fn write(&self, path: &Path) -> anyhow::Result<()> {
        let directory = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        let mut file = tempfile::NamedTempFile::new_in(directory.unwrap_or(Path::new(".")))
            .with_context(|| format!("cannot write {}", path.display()))?;
        serde_json::to_writer_pretty(&mut file, self)?;
        file.persist(path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(())
    }

    /// The `up` that runs with this data directory now, if any.
    pub fn find(data_directory: &Path) -> Option<Self> {
        let text = fs::read_to_string(data_directory.join(RUNNING)).ok()?;
        // A killed process leaves its file behind, and its PID may have been reused.
        if !apiserver::store::is_in_use(data_directory) {
            return None;
        }
        serde_json::from_str(&text).ok()
    }
}

/// The file of [`Running`] in a data directory.
pub fn running_file(data_directory: &Path) -> PathBuf {
    data_directory.join(RUNNING)
}

/// The data directory of `up` unless one is given.
pub fn default_path() -> anyhow::Result<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(home) = variable("AGENT_SANDBOX_HOME") {
        return Ok(PathBuf::from(home));
    }
    if let Some(state) = variable("XDG_STATE_HOME") {
        return Ok(PathBuf::from(state).join("agent-sandbox"));
    }
    let home = variable("HOME").context(
        "there is no place for the data directory: set --data-dir, AGENT_SANDBOX_HOME or HOME",
    )?;
    Ok(PathBuf::from(home).join(".local/state/agent-sandbox"))
}

/// Creates the data directory, or removes the permissions of other users from an existing one.
pub fn create(path: &Path) -> anyhow::Result<()> {
    apiserver::store::directory::make_private(path)
        .map_err(anyhow::Error::from)
        .and_then(|()| Ok(writable(path)?))
        .with_context(|| {
            format!(
                "cannot use {} as data directory; choose another with --data-dir",
                path.display()
            )
        })
}

fn writable(path: &Path) -> io::Result<()> {
    tempfile::tempfile_in(path).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_system_is_found_only_while_its_process_has_the_directory() {
        // As `up` makes it: one that others may enter, with files in it, is refused.
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let directory = tempfile::Builder::new().permissions(private).tempdir();
        let directory = directory.unwrap();
        let written = Running {
            kubeconfig: directory.path().join("kubeconfig"),
            api_server: "https://127.0.0.1:1".to_owned(),
            router: None,
            router_https: None,
            metrics: String::new(),
            namespace: "default".to_owned(),
            template: None,
            warm_pool: None,
            disabled: Vec::new(),
            // A process that runs, but does not use this directory.
            pid: std::process::id(),
        };
        written.write(&running_file(directory.path())).unwrap();
        assert!(Running::find(directory.path()).is_none());
        let config = apiserver::Config::new(directory.path());
        let server = apiserver::Server::open(config).await.unwrap();
        let found = Running::find(directory.path()).unwrap();
        assert_eq!(found.api_server, written.api_server);
        server.shutdown().await;
        assert!(Running::find(directory.path()).is_none());
    }
}
