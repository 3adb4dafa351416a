//! Who may use sandboxes through the router of `up`: the user who started it, unless a flag says otherwise.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, ValueEnum};
use router::{AuthorizationMode, ProxyArgs};

use crate::rootless;

/// The key of tokens for single sandboxes that `up` makes for itself, in its data directory.
const TOKEN_KEY: &str = "router-token.key";
const TOKEN_KEY_BYTES: usize = 32;

/// Who may use a sandbox. The names are those of the router's own `--authz-mode`, and `local-user`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum RouterAuthz {
    /// Root and the user who started `up`, by their connections; others with a token of `agent-sandbox token`, or of an account
    /// that may create pods/portforward
    #[default]
    LocalUser,
    /// Clients with a token of an account of the API
    #[value(name = "tokenreview")]
    TokenReview,
    /// Clients with a token of `agent-sandbox token`
    ScopedToken,
    /// All clients that can connect: every user of this machine
    None,
}

#[derive(Clone, Debug, Default, Args)]
pub struct RouterAccess {
    /// Who may use sandboxes through the router
    #[arg(long, value_enum, value_name = "MODE", default_value = "local-user")]
    pub router_authz: RouterAuthz,

    /// The key of tokens for single sandboxes: a secret of at least 32 bytes, or an Ed25519 key as PEM [default: router-token.key in
    /// the data directory, made when it is missing]
    #[arg(long, value_name = "FILE")]
    pub scoped_token_key_file: Option<PathBuf>,
}

impl RouterAccess {
    /// How the router decides.
    pub fn mode(
        &self,
        data_directory: &Path,
        local_users: &[u32],
        flags: &ProxyArgs,
    ) -> anyhow::Result<AuthorizationMode> {
        Ok(match self.router_authz {
            RouterAuthz::LocalUser => AuthorizationMode::LocalUsers {
                users: local_users.to_vec(),
                key_file: Some(self.key_file(data_directory)?),
            },
            RouterAuthz::TokenReview => flags.token_review(),
            RouterAuthz::ScopedToken => AuthorizationMode::ScopedToken {
                key_file: self.key_file(data_directory)?,
            },
            RouterAuthz::None => AuthorizationMode::None,
        })
    }

    fn key_file(&self, data_directory: &Path) -> anyhow::Result<PathBuf> {
        if let Some(path) = &self.scoped_token_key_file {
            return Ok(path.clone());
        }
        let path = token_key(data_directory);
        if !path.exists() {
            write_key(&path).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(path)
    }
}

/// Where `up` keeps the key of tokens for single sandboxes.
pub fn token_key(data_directory: &Path) -> PathBuf {
    data_directory.join(TOKEN_KEY)
}

/// Writes a new key, readable by its owner alone.
fn write_key(path: &Path) -> anyhow::Result<()> {
    let mut key = [0; TOKEN_KEY_BYTES];
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
    let directory = path.parent().context("a file is in a directory")?;
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    for byte in key {
        write!(file, "{byte:02x}")?;
    }
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

/// The users of this machine who need no token and reach pods: root, and the user who started `up`, also by way of `sudo`.
pub fn local_users() -> anyhow::Result<Vec<u32>> {
    let started_by = match rootless::outside()? {
        Some(outside) => Some(outside.user),
        None => std::env::var("SUDO_UID")
            .ok()
            .and_then(|uid| uid.parse().ok()),
    };
    Ok(trusted(rustix::process::geteuid().as_raw(), started_by))
}

/// The user behind `sudo`. Only root trusts `SUDO_UID`: any other user may have set the variable.
fn trusted(effective: u32, started_by: Option<u32>) -> Vec<u32> {
    let started_by = started_by.filter(|_| effective == 0);
    let mut users = vec![0, effective];
    users.extend(started_by);
    users.sort_unstable();
    users.dedup();
    users
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn root_and_who_started_it_are_trusted() {
        assert_eq!(trusted(0, None), [0]);
        assert_eq!(trusted(0, Some(1000)), [0, 1000]);
        assert_eq!(trusted(1000, None), [0, 1000]);
        assert_eq!(trusted(1000, Some(1001)), [0, 1000]);
    }

    #[test]
    fn a_key_is_made_once_and_is_its_owners_secret() {
        let directory = tempfile::tempdir().unwrap();
        let access = RouterAccess::default();
        let path = access.key_file(directory.path()).unwrap();
        let key = std::fs::read(&path).unwrap();
        assert_eq!(key.len(), 2 * TOKEN_KEY_BYTES);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        access.key_file(directory.path()).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), key);
    }
}
