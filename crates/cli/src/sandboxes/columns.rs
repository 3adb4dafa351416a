//! How each kind looks as a row of a table. Pure.

use api::claim::{ClaimSource, WarmPoolPolicy};
use api::conditions::{self, ConditionType, Reason};
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use clap::ValueEnum;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::Known;
use crate::output::{self, Detail};

/// The content of an empty cell.
pub const NOTHING: &str = "–";

/// The kinds by the names that people use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    #[default]
    #[value(name = "claims", aliases = ["claim", "sandboxclaims", "sandboxclaim"])]
    Claim,
    #[value(name = "sandboxes", aliases = ["sandbox"])]
    Sandbox,
    #[value(name = "pools", aliases = ["pool", "warmpools", "warmpool", "sandboxwarmpools", "sandboxwarmpool", "swp"])]
    Pool,
    #[value(name = "templates", aliases = ["template", "sandboxtemplates", "sandboxtemplate"])]
    Template,
}

/// A kind that is shown in tables.
pub trait Shown: Known {
    const SINGULAR: &'static str;
    const PLURAL: &'static str;
    /// The titles between the name and the age, and those that only a wide table has, after the age.
    const TITLES: (&'static [&'static str], &'static [&'static str]);

    /// The cells under these titles.
    fn cells(&self, now: Timestamp) -> (Vec<String>, Vec<String>);

    fn conditions(&self) -> &[Condition];
}

/// The titles of a kind's table. The namespace is shown where there can be several.
pub fn header<Kind: Shown>(with_namespace: bool, detail: Detail) -> Vec<&'static str> {
    let (narrow, wide) = Kind::TITLES;
    let mut titles = Vec::new();
    if with_namespace {
        titles.push("NAMESPACE");
    }
    titles.push("NAME");
    titles.extend(narrow);
    titles.push("AGE");
    if detail == Detail::Wide {
        titles.extend(wide);
    }
    titles
}

/// The row of an object, under the titles of [`header`].
pub fn row<Kind: Shown>(
    object: &Kind,
    with_namespace: bool,
    detail: Detail,
    now: Timestamp,
) -> Vec<String> {
    let (narrow, wide) = object.cells(now);
    let mut cells = Vec::new();
    if with_namespace {
        cells.push(object.namespace().unwrap_or_default());
    }
    cells.push(object.name_any());
    cells.extend(narrow);
    cells.push(age(object.meta(), now));
    if detail == Detail::Wide {
        cells.extend(wide);
    }
    output::visible_cells(cells)
}

pub fn age(metadata: &ObjectMeta, now: Timestamp) -> String {
    let created = metadata.creation_timestamp.as_ref();
    created.map_or_else(nothing, |created| output::age(created.0, now))
}

fn nothing() -> String {
    NOTHING.to_owned()
}

fn or_nothing(text: Option<String>) -> String {
    text.filter(|text| !text.is_empty()).unwrap_or_else(nothing)
}

/// The status and the reason of the Ready condition, or that the object is being deleted or frozen.
fn ready(metadata: &ObjectMeta, conditions: &[Condition]) -> [String; 2] {
    if metadata.deletion_timestamp.is_some() {
        return ["False".to_owned(), "Terminating".to_owned()];
    }
    let suspended = conditions::find(conditions, ConditionType::Suspended);
    let frozen = suspended.filter(|suspended| {
        suspended.status == "True" && suspended.reason == Reason::Frozen.as_str()
    });
    match conditions::find(conditions, ConditionType::Ready) {
        Some(ready) if frozen.is_some() => {
            [ready.status.clone(), Reason::Frozen.as_str().to_owned()]
        }
        Some(ready) => [ready.status.clone(), ready.reason.clone()],
        None => ["Unknown".to_owned(), nothing()],
    }
}

/// Where a claim's sandbox comes from, as `pool/x` or `template/x`.
pub fn source(claim: &SandboxClaim) -> String {
    match claim.spec.source() {
        Ok(ClaimSource::Pool { pool }) => format!("pool/{pool}"),
        Ok(ClaimSource::Template {
            template,
            warm_pool,
        }) => match warm_pool {
            WarmPoolPolicy::Any => format!("template/{template}"),
            WarmPoolPolicy::None => format!("template/{template}, cold"),
            WarmPoolPolicy::Only(pool) => format!("template/{template}, pool/{pool}"),
        },
        Err(_) => nothing(),
    }
}

/// The owner of a sandbox, as `claim/x` or `pool/x`.
pub fn holder(sandbox: &Sandbox) -> Option<String> {
    sandbox.owner_references().iter().find_map(|owner| {
        let kind = match owner.kind.as_str() {
            "SandboxClaim" => "claim",
            "SandboxWarmPool" => "pool",
            "SandboxSet" => "set",
            _ => return None,
        };
        Some(format!("{kind}/{}", owner.name))
    })
}

impl Shown for SandboxClaim {
    const SINGULAR: &'static str = "claim";
    const PLURAL: &'static str = "claims";
    const TITLES: (&'static [&'static str], &'static [&'static str]) = (
        &["READY", "REASON", "SANDBOX"],
        &["POD IPS", "FROM", "ENDS"],
    );

    fn cells(&self, now: Timestamp) -> (Vec<String>, Vec<String>) {
        let status = self.status.clone().unwrap_or_default();
        let [ready, reason] = ready(&self.metadata, &status.conditions);
        let bound = status.sandbox.unwrap_or_default();
        let ends = self.spec.lifecycle.as_ref();
        let ends = ends.and_then(|lifecycle| lifecycle.shutdown_time.as_ref());
        let ends = ends.map(|time| output::until(time.0, now));
        (
            vec![ready, reason, or_nothing(Some(bound.name))],
            vec![
                or_nothing(Some(bound.pod_ips.join(","))),
                source(self),
                or_nothing(ends),
            ],
        )
    }

    fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| &status.conditions)
    }
}

impl Shown for Sandbox {
    const SINGULAR: &'static str = "sandbox";
    const PLURAL: &'static str = "sandboxes";
    const TITLES: (&'static [&'static str], &'static [&'static str]) = (
        &["READY", "REASON", "FOR"],
        &["POD IPS", "NODE", "TEMPLATE"],
    );

    fn cells(&self, _now: Timestamp) -> (Vec<String>, Vec<String>) {
        let status = self.status.clone().unwrap_or_default();
        let [ready, reason] = ready(&self.metadata, &status.conditions);
        let template = self.annotations().get(api::labels::SANDBOX_TEMPLATE_REF);
        (
            vec![ready, reason, or_nothing(holder(self))],
            vec![
                or_nothing(Some(status.pod_ips.join(","))),
                or_nothing(status.node_name),
                or_nothing(template.cloned()),
            ],
        )
    }

    fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| &status.conditions)
    }
}

impl Shown for SandboxWarmPool {
    const SINGULAR: &'static str = "warm pool";
    const PLURAL: &'static str = "pools";
    const TITLES: (&'static [&'static str], &'static [&'static str]) =
        (&["DESIRED", "READY", "TEMPLATE"], &["CURRENT", "UPDATED"]);

    fn cells(&self, _now: Timestamp) -> (Vec<String>, Vec<String>) {
        let status = self.status.clone().unwrap_or_default();
        (
            vec![
                self.spec.desired_replicas().to_string(),
                status.ready_replicas.to_string(),
                self.spec.sandbox_template_ref.name.clone(),
            ],
            vec![
                status.replicas.to_string(),
                status.updated_replicas.to_string(),
            ],
        )
    }

    fn conditions(&self) -> &[Condition] {
        self.status
            .as_ref()
            .map_or(&[], |status| &status.conditions)
    }
}

impl Shown for SandboxTemplate {
    const SINGULAR: &'static str = "template";
    const PLURAL: &'static str = "templates";
    const TITLES: (&'static [&'static str], &'static [&'static str]) =
        (&["IMAGES"], &["RUNTIME CLASS", "VOLUMES"]);

    fn cells(&self, _now: Timestamp) -> (Vec<String>, Vec<String>) {
        let pod = &self.spec.pod_template.spec;
        let images: Vec<&str> = pod
            .containers
            .iter()
            .filter_map(|container| container.image.as_deref())
            .collect();
        let volumes: Vec<String> = self
            .spec
            .volume_claim_templates
            .iter()
            .flatten()
            .filter_map(|volume| volume.metadata.name.clone())
            .collect();
        (
            vec![or_nothing(Some(images.join(",")))],
            vec![
                or_nothing(pod.runtime_class_name.clone()),
                or_nothing(Some(volumes.join(","))),
            ],
        )
    }

    fn conditions(&self) -> &[Condition] {
        &[]
    }
}
