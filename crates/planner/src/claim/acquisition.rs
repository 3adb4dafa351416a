//! How a claim gets its sandbox: which warm sandbox it may adopt, how it is transferred, or how one is created for it.

use api::claim::{ClaimSource, WarmPoolPolicy};
use api::conditions::{self, ConditionType, Reason};
use api::names::name_hash;
use api::sandbox::{PodMetadata, SuspensionStrategy};
use api::template::StrategyNotAllowed;
use api::{Sandbox, SandboxClaim, SandboxWarmPool, labels};
use kube::ResourceExt;
use serde_json::json;

use super::binding::bind;
use super::pod_metadata::{claim_identity, claimed, metadata_patch, patch_of_pod, sync};
use super::{ClaimFacts, Effect, Holding, Lookup, Obstacle, blueprint, validate};
use crate::blueprint::Blueprint;
use crate::owner::{controller_of, controller_reference, refers_to, refers_to_predecessor};
use crate::version::Version;
use crate::warm_queue::{Candidate, Request, SandboxKey};
use crate::{env_injection, volume_claims};

/// The labels that mark a sandbox as a pool's, and go when it is claimed.
const POOL_LABELS: [&str; 3] = [
    labels::WARM_POOL_SANDBOX,
    labels::SANDBOX_TEMPLATE_REF_HASH,
    labels::SANDBOX_POD_TEMPLATE_HASH,
];

/// Whether claims may take this sandbox: it is or was a pool's, and is neither finished, suspended, expired nor being deleted.
pub fn is_adoptable(sandbox: &Sandbox) -> bool {
    let conditions = sandbox
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    let has_ended = conditions::is_true(conditions, ConditionType::Finished)
        || conditions::find(conditions, ConditionType::Ready)
            .is_some_and(|ready| ready.reason == Reason::SandboxExpired.as_str());
    sandbox.metadata.deletion_timestamp.is_none()
        && sandbox.labels().contains_key(labels::WARM_POOL_SANDBOX)
        && sandbox
            .labels()
            .contains_key(labels::SANDBOX_TEMPLATE_REF_HASH)
        && controller_of(&sandbox.metadata).is_none_or(refers_to::<SandboxWarmPool>)
        && !sandbox.spec.suspension().is_requested()
        && !has_ended
}

/// The warm queue's entry for a sandbox, if claims may take it.
pub fn candidate(sandbox: &Sandbox) -> Option<Candidate> {
    if !is_adoptable(sandbox) {
        return None;
    }
    let label = |key: &str| sandbox.labels().get(key).cloned().unwrap_or_default();
    let conditions = sandbox
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    Some(Candidate {
        key: SandboxKey {
            namespace: sandbox.namespace().unwrap_or_default(),
            name: sandbox.name_any(),
        },
        uid: sandbox.uid().unwrap_or_default(),
        template_hash: label(labels::SANDBOX_TEMPLATE_REF_HASH),
        pool_hash: label(labels::WARM_POOL_SANDBOX),
        revision: label(labels::SANDBOX_POD_TEMPLATE_HASH),
        ready: conditions::is_true(conditions, ConditionType::Ready),
    })
}

/// The claim's request to the warm queue, if it may take a warm sandbox.
pub fn warm_request(
    claim: &SandboxClaim,
    pool: Lookup<'_, SandboxWarmPool>,
    holding: Holding<'_>,
) -> Option<Request> {
    if !matches!(holding, Holding::Free | Holding::Broken { .. }) || wants_its_own(claim) {
        return None;
    }
    let (template, pool_hash) = match validate(claim).ok()? {
        ClaimSource::Template {
            template,
            warm_pool,
        } => match warm_pool {
            WarmPoolPolicy::None => return None,
            WarmPoolPolicy::Any => (template, None),
            WarmPoolPolicy::Only(name) => (template, Some(name_hash(name))),
        },
        ClaimSource::Pool { pool: name } => {
            let pool = pool.found()?;
            let template = pool.spec.sandbox_template_ref.name.as_str();
            (template, Some(name_hash(name)))
        }
    };
    Some(Request {
        namespace: claim.namespace().unwrap_or_default(),
        template_hash: name_hash(template),
        pool_hash,
    })
}

/// Whether the claim's spec allows it to adopt this warm sandbox. A user can write any sandbox's name on a claim; that must not
/// bypass the template, the pool, `warmpool: none` or `env` of its spec (confused deputy).
pub(super) fn allows_adoption(claim: &SandboxClaim, sandbox: &Sandbox) -> bool {
    let is_labelled =
        |label: &str, name: &str| sandbox.labels().get(label) == Some(&name_hash(name));
    if wants_its_own(claim) {
        return false;
    }
    match claim.spec.source() {
        Ok(ClaimSource::Template {
            template,
            warm_pool,
        }) => {
            let is_from_pool = match warm_pool {
                WarmPoolPolicy::None => false,
                WarmPoolPolicy::Any => true,
                WarmPoolPolicy::Only(pool) => is_labelled(labels::WARM_POOL_SANDBOX, pool),
            };
            is_from_pool && is_labelled(labels::SANDBOX_TEMPLATE_REF_HASH, template)
        }
        Ok(ClaimSource::Pool { pool }) => is_labelled(labels::WARM_POOL_SANDBOX, pool),
        Err(_) => false,
    }
}

/// Whether the claim sets environment variables or volumes, which an existing sandbox cannot get.
fn wants_its_own(claim: &SandboxClaim) -> bool {
    let has_env = claim.spec.env.as_ref().is_some_and(|env| !env.is_empty());
    let has_volumes = claim
        .spec
        .volume_claim_templates
        .as_ref()
        .is_some_and(|volumes| !volumes.is_empty());
    has_env || has_volumes
}

/// The effects that get the claim its sandbox, or the obstacle.
pub(super) fn decide(observed: &ClaimFacts<'_>) -> Result<Vec<Effect>, Obstacle> {
    let claim = observed.claim;
    let source = validate(claim)?;
    let blueprint = blueprint(observed.template);
    match observed.holding {
        Holding::Owned(sandbox) => sync(claim, sandbox, blueprint.as_ref()),
        Holding::Bound(sandbox) if is_trustworthy(sandbox, blueprint.as_ref()) => {
            let patch = transfer(claim, sandbox, blueprint.as_ref())?;
            Ok(vec![patch])
        }
        Holding::Planned => {
            refuse_env_beside_pools(claim, source)?;
            let blueprint = required(observed, source, blueprint)?;
            Ok(vec![create(observed, &blueprint)?])
        }
        Holding::Free | Holding::Broken { .. } | Holding::Bound(_) => {
            refuse_env_beside_pools(claim, source)?;
            let blueprint = required(observed, source, blueprint)?;
            let may_be_warm = warm_request(claim, observed.pool, observed.holding).is_some();
            if let Some(sandbox) = observed
                .candidate
                .filter(|sandbox| may_be_warm && is_trustworthy(sandbox, Some(&blueprint)))
            {
                let transfer = transfer(claim, sandbox, Some(&blueprint))?;
                return Ok(vec![bind(observed, &sandbox.name_any()), transfer]);
            }
            let create = create(observed, &blueprint)?;
            Ok(vec![bind(observed, &claim.name_any()), create])
        }
    }
}

/// A sandbox without a controller may carry any labels, so it is only trusted if it runs what the template says.
fn is_trustworthy(sandbox: &Sandbox, blueprint: Option<&Blueprint<'_>>) -> bool {
    controller_of(&sandbox.metadata).is_some()
        || blueprint.is_some_and(|blueprint| blueprint.would_make(&sandbox.spec.pod_template.spec))
}

fn refuse_env_beside_pools(claim: &SandboxClaim, source: ClaimSource<'_>) -> Result<(), Obstacle> {
    let has_env = claim.spec.env.as_ref().is_some_and(|env| !env.is_empty());
    match source {
        ClaimSource::Template { warm_pool, .. } if has_env && warm_pool != WarmPoolPolicy::None => {
            Err(Obstacle::new(
                Reason::EnvVarsInjectionRejected,
                "spec.env: environment variables cannot be injected into a warm sandbox; set spec.warmpool to \"none\"",
            ))
        }
        _ => Ok(()),
    }
}

fn required<'a>(
    observed: &ClaimFacts<'a>,
    source: ClaimSource<'_>,
    blueprint: Option<Blueprint<'a>>,
) -> Result<Blueprint<'a>, Obstacle> {
    blueprint.ok_or_else(|| match (source, observed.pool) {
        (ClaimSource::Pool { pool: name }, Lookup::Missing | Lookup::NotAsked) => Obstacle::new(
            Reason::WarmPoolNotFound,
            format!("SandboxWarmPool {name:?} not found"),
        ),
        (ClaimSource::Pool { .. }, Lookup::Found(pool)) => {
            template_not_found(&pool.spec.sandbox_template_ref.name)
        }
        (ClaimSource::Template { template, .. }, _) => template_not_found(template),
    })
}

fn template_not_found(name: &str) -> Obstacle {
    Obstacle::new(
        Reason::TemplateNotFound,
        format!("SandboxTemplate {name:?} not found"),
    )
}

/// Makes a warm sandbox the claim's: it leaves its pool, and its pod gets the claim's labels.
///
/// The pod keeps the label its network policy selects throughout.
fn transfer(
    claim: &SandboxClaim,
    sandbox: &Sandbox,
    blueprint: Option<&Blueprint<'_>>,
) -> Result<Effect, Obstacle> {
    let mut labels = sandbox.labels().clone();
    for key in POOL_LABELS {
        labels.remove(key);
    }
    labels.extend(claim_identity(claim));
    labels.extend([launch_type(labels::LAUNCH_TYPE_WARM)]);
    let mut annotations = sandbox.annotations().clone();
    annotations.insert(labels::POD_NAME.to_owned(), sandbox.name_any());
    annotations.extend(trace_context(claim));

    let current = &sandbox.metadata;
    let mut metadata = metadata_patch(
        (&current.labels, &labels),
        (&current.annotations, &annotations),
    );
    metadata.insert(
        "ownerReferences".into(),
        json!([controller_reference(claim)]),
    );
    let mut transfer = json!({ "metadata": metadata });
    let desired = claimed(claim, sandbox, blueprint)?;
    if let Some(pod_metadata) = patch_of_pod(sandbox, &desired) {
        transfer["spec"] = pod_metadata;
    }
    let strategy = suspension_strategy(claim, sandbox, blueprint)?;
    if strategy != sandbox.spec.suspension_strategy {
        transfer["spec"]["suspensionStrategy"] = json!(strategy);
    }
    Ok(Effect::Transfer {
        sandbox: Version::of(sandbox),
        patch: transfer,
    })
}

/// How the sandbox of a claim is suspended. Without its template, a warm sandbox keeps the strategy it has.
fn suspension_strategy(
    claim: &SandboxClaim,
    sandbox: &Sandbox,
    blueprint: Option<&Blueprint<'_>>,
) -> Result<Option<SuspensionStrategy>, Obstacle> {
    let chosen = claim.spec.suspension_strategy;
    let allowed = match blueprint {
        Some(blueprint) => blueprint.template.spec.suspension_strategy(chosen),
        None => match chosen.map(|chosen| chosen.kind) {
            Some(chosen) if chosen != sandbox.spec.suspension_type() => Err(StrategyNotAllowed {
                chosen,
                allowed: vec![sandbox.spec.suspension_type()],
            }),
            _ => Ok(sandbox.spec.suspension_strategy),
        },
    };
    allowed.map_err(|error| Obstacle::new(Reason::InvalidConfiguration, error))
}

/// Makes a sandbox for this claim alone, under the claim's name.
fn create(observed: &ClaimFacts<'_>, blueprint: &Blueprint<'_>) -> Result<Effect, Obstacle> {
    let claim = observed.claim;
    if let Some(namesake) = observed.namesake {
        if is_leaving(claim, namesake) {
            return Err(Obstacle::new(
                Reason::SandboxNotReady,
                format!(
                    "Sandbox {:?} of an earlier claim is being deleted; a new one is made once it is gone",
                    namesake.name_any()
                ),
            ));
        }
        let owner = controller_of(&namesake.metadata).map_or_else(
            || "no controller".to_owned(),
            |owner| format!("{} {:?}", owner.kind, owner.name),
        );
        return Err(Obstacle::new(
            Reason::ReconcilerError,
            format!(
                "Sandbox {:?} already exists and belongs to {owner}, not to this claim",
                namesake.name_any()
            ),
        ));
    }
    let spec = &blueprint.template.spec;
    let volumes = volume_claims::merge(
        spec.volume_claim_templates_policy(),
        spec.volume_claim_templates.as_deref(),
        claim.spec.volume_claim_templates.as_deref(),
    )
    .map_err(|error| Obstacle::new(Reason::VolumeClaimTemplatesError, error))?;
    let mut pod_spec = blueprint.pod_spec();
    env_injection::inject(
        spec.env_vars_injection_policy(),
        claim.spec.env.as_deref().unwrap_or_default(),
        &mut pod_spec,
    )
    .map_err(|error| Obstacle::new(Reason::EnvVarsInjectionRejected, error))?;

    let mut sandbox = blueprint.sandbox(pod_spec, PodMetadata::default(), volumes);
    sandbox.spec.pod_template.metadata = claimed(claim, &sandbox, Some(blueprint))?;
    sandbox.spec.suspension_strategy = suspension_strategy(claim, &sandbox, Some(blueprint))?;
    let mut identity = claim_identity(claim);
    identity.insert(
        labels::SANDBOX_TEMPLATE_REF_HASH.to_owned(),
        blueprint.name_hash.clone(),
    );
    identity.extend([launch_type(labels::LAUNCH_TYPE_COLD)]);
    sandbox.metadata.name = Some(claim.name_any());
    sandbox.metadata.namespace = claim.namespace();
    sandbox.metadata.labels = Some(identity);
    sandbox.metadata.owner_references = Some(vec![controller_reference(claim)]);
    sandbox.annotations_mut().extend(trace_context(claim));
    Ok(Effect::Create {
        sandbox: Box::new(sandbox),
    })
}

/// Whether a sandbox of the claim's name is being deleted, or belonged to an earlier claim of this name and is not
/// garbage-collected yet.
fn is_leaving(claim: &SandboxClaim, namesake: &Sandbox) -> bool {
    let (name, uid) = (claim.name_any(), claim.metadata.uid.as_deref());
    namesake.metadata.deletion_timestamp.is_some()
        || controller_of(&namesake.metadata)
            .is_some_and(|owner| refers_to_predecessor::<SandboxClaim>(owner, &name, uid))
}

/// The label of a sandbox, but not of its pod, for warm or cold start.
fn launch_type(value: &str) -> (String, String) {
    (labels::LAUNCH_TYPE.to_owned(), value.to_owned())
}

fn trace_context(claim: &SandboxClaim) -> Option<(String, String)> {
    claim
        .annotations()
        .get_key_value(labels::TRACE_CONTEXT)
        .map(|(key, value)| (key.clone(), value.clone()))
}
