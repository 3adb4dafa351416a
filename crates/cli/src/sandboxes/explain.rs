//! Errors about objects that do not exist list those that do: the name is often a misspelling.

use anyhow::Context;
use api::conditions::Reason;
use api::decoding::Decoded;
use api::{SandboxClaim, SandboxTemplate, SandboxWarmPool};
use kube::api::ListParams;
use kube::{Client, ResourceExt};

use super::columns::Shown;
use super::{Known, scoped};
use crate::connection::Connected;
use crate::output::causes;

/// More names than this do not help.
const MOST_NAMES: usize = 8;

/// The error for a claim that got no sandbox.
pub async fn creation(connected: &Connected, error: sdk::Error) -> anyhow::Error {
    let (client, namespace) = (&connected.client, connected.namespace.as_str());
    if let sdk::ErrorKind::ClaimFailed {
        cause: kube::Error::Api(status),
    } = error.kind()
        && status.code == 409
        && let Some(key) = error.sandbox()
    {
        let name = &key.claim;
        return anyhow::anyhow!(
            "a claim named {name} exists already in namespace {namespace}; `agent-sandbox get {name}` shows it"
        );
    }
    if let sdk::ErrorKind::OrphanedClaim {
        cause,
        cleanup: None,
    } = error.kind()
        && let Some(key) = error.sandbox()
    {
        let name = &key.claim;
        let cause = causes(anyhow::Chain::new(cause.as_ref()));
        return anyhow::anyhow!(
            "{cause}; kept as claim {name} in namespace {namespace}: `agent-sandbox get {name}` and `agent-sandbox status` show it, `agent-sandbox delete {name}` deletes it"
        );
    }
    let reason = error.reason().and_then(Reason::from_wire);
    let there = match reason {
        Some(Reason::TemplateNotFound) => names_there::<SandboxTemplate>(client, namespace).await,
        Some(Reason::WarmPoolNotFound) => names_there::<SandboxWarmPool>(client, namespace).await,
        _ => return error.into(),
    };
    let message = match error.kind() {
        sdk::ErrorKind::Refused { message, .. } => message.clone(),
        other => other.to_string(),
    };
    anyhow::anyhow!("{message} in namespace {namespace}; {there}")
}

/// A handle on a claim that exists, or an error that names those that do.
pub async fn attach(connected: &Connected, name: &str) -> anyhow::Result<sdk::Sandbox> {
    match connected.sandboxes()?.attach(name).await {
        Ok(sandbox) => Ok(sandbox),
        Err(error) if error.is_not_found() => {
            Err(missing::<SandboxClaim>(&connected.client, &connected.namespace, name).await)
        }
        Err(error) => Err(error.into()),
    }
}

/// The object of this name, or an error that names those there are.
pub async fn get<Kind: Shown>(
    client: &Client,
    namespace: &str,
    name: &str,
) -> anyhow::Result<Kind> {
    let objects = scoped::<Decoded<Kind>>(client, Some(namespace));
    let found = objects.get_opt(name).await;
    match found.with_context(|| format!("cannot read {} {name}", Kind::SINGULAR))? {
        Some(Decoded::Readable(object)) => Ok(object),
        Some(Decoded::Unreadable(left)) => anyhow::bail!("{} {left}", Kind::SINGULAR),
        None => Err(missing::<Kind>(client, namespace, name).await),
    }
}

pub async fn missing<Kind: Shown>(client: &Client, namespace: &str, name: &str) -> anyhow::Error {
    let there = names_there::<Kind>(client, namespace).await;
    anyhow::anyhow!(
        "no {} named {name} in namespace {namespace}; {there}",
        Kind::SINGULAR
    )
}

async fn names_there<Kind: Shown + Known>(client: &Client, namespace: &str) -> String {
    let listed = scoped::<Decoded<Kind>>(client, Some(namespace))
        .list(&ListParams::default())
        .await;
    let names: Vec<String> = match listed {
        Ok(objects) => objects.iter().map(ResourceExt::name_any).collect(),
        // Listing failed too: report the first error.
        Err(_) => return format!("its {} cannot be listed", Kind::PLURAL),
    };
    sentence(Kind::PLURAL, &names)
}

fn sentence(plural: &str, names: &[String]) -> String {
    match names.len() {
        0 => format!("there are no {plural} here"),
        count if count > MOST_NAMES => format!(
            "{plural} here: {} and {} more",
            names[..MOST_NAMES].join(", "),
            count - MOST_NAMES
        ),
        _ => format!("{plural} here: {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_is_named_as_far_as_it_helps() {
        let names = |count: usize| -> Vec<String> { (0..count).map(|n| format!("p{n}")).collect() };
        assert_eq!(sentence("pools", &names(0)), "there are no pools here");
        assert_eq!(sentence("pools", &names(2)), "pools here: p0, p1");
        assert!(sentence("pools", &names(10)).ends_with("p7 and 2 more"));
    }
}
