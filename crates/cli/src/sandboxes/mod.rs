//! The commands on claims, sandboxes, pools and templates, one file each, and what they share.

mod claim;
mod columns;
mod copy;
mod delete;
mod exec;
mod explain;
mod get;
mod list;
mod logs;
mod mode;
mod object;
mod overview;
mod scale;
mod status;

use std::fmt::Debug;

use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use claim::{ClaimArguments, Created, Source, Wait, claim, create};
pub use copy::{CopyArguments, copy};
pub use delete::{DeleteArguments, delete, delete_everything};
pub use exec::{ExecArguments, exec};
pub use get::{GetArguments, get};
pub use list::{ListArguments, list};
pub use logs::{LogsArguments, logs};
pub use mode::{ResumeArguments, SuspendArguments, resume, suspend};
pub use scale::{ScaleArguments, scale};
pub use status::{StatusArguments, status};

use crate::connection::{self, Connected};

/// A kind that these commands can name: it lives in a namespace, and its shape is known.
pub trait Known:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + DeserializeOwned
    + Serialize
    + Send
    + Sync
    + 'static
{
}

impl<Kind> Known for Kind where
    Kind: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Serialize
        + Send
        + Sync
        + 'static
{
}

/// The objects of a kind in one namespace, or in all.
fn scoped<Kind: Known>(client: &Client, namespace: Option<&str>) -> Api<Kind> {
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// Connects to an API that serves the kinds. The error names the remedy.
async fn connect(arguments: &connection::Arguments) -> anyhow::Result<Connected> {
    let connected = arguments.connect_or_explain().await?;
    connected.require_kinds().await?;
    Ok(connected)
}
