//! Refused claims: the messages, and that correcting the reported field is sufficient.

use api::claim::EnvVar;
use api::sandbox::{PersistentVolumeClaimTemplate, PodMetadata};
use api::template::{EnvVarsInjectionPolicy, VolumeClaimTemplatesPolicy};
use api::{Sandbox, SandboxClaim, SandboxSpec, SandboxTemplate};
use k8s_openapi::api::core::v1::{PersistentVolumeClaimSpec, VolumeResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use kube::api::{ApiResource, DynamicObject, PostParams};
use serde_json::{Value, json};

use crate::support::{Cluster, NAMESPACE, claim, claim_from, message_of, pool, template};

/// What makes a refused claim acceptable.
enum Remedy {
    Claim(Value),
    Template(Value),
    DeleteSandbox(&'static str),
}

/// A claim on the template of its own name that is refused.
struct Refusal {
    claim: SandboxClaim,
    template: SandboxTemplate,
    reason: &'static str,
    /// What the message must name.
    names: &'static [&'static str],
    remedy: Remedy,
}

fn refusal(
    name: &str,
    reason: &'static str,
    names: &'static [&'static str],
    remedy: Remedy,
    change: impl FnOnce(&mut SandboxClaim, &mut SandboxTemplate),
) -> Refusal {
    let (mut claim, mut template) = (claim(name, name), template(name));
    change(&mut claim, &mut template);
    Refusal {
        claim,
        template,
        reason,
        names,
        remedy,
    }
}

fn labels(claim: &mut SandboxClaim, key: &str, value: &str) {
    claim.spec.additional_pod_metadata = Some(PodMetadata {
        labels: Some([(key.to_owned(), value.to_owned())].into()),
        annotations: None,
    });
}

fn annotations(claim: &mut SandboxClaim, key: &str, value: &str) {
    claim.spec.additional_pod_metadata = Some(PodMetadata {
        labels: None,
        annotations: Some([(key.to_owned(), value.to_owned())].into()),
    });
}

/// A variable of a claim that starts cold.
fn env(claim: &mut SandboxClaim, name: &str, container: Option<&str>) {
    claim.spec.warmpool = Some("none".into());
    claim.spec.env = Some(vec![EnvVar {
        name: name.into(),
        value: "claim".into(),
        container_name: container.map(Into::into),
    }]);
}

fn volume(name: Option<&str>, size: &str) -> PersistentVolumeClaimTemplate {
    let mut volume = PersistentVolumeClaimTemplate::default();
    volume.metadata.name = name.map(Into::into);
    volume.spec = PersistentVolumeClaimSpec {
        access_modes: Some(vec!["ReadWriteOnce".into()]),
        resources: Some(VolumeResourceRequirements {
            requests: Some([("storage".to_owned(), Quantity(size.to_owned()))].into()),
            ..VolumeResourceRequirements::default()
        }),
        ..PersistentVolumeClaimSpec::default()
    };
    volume
}

fn metadata_refusals() -> Vec<Refusal> {
    let relabel = |labels: Value| {
        Remedy::Claim(json!({ "spec": { "additionalPodMetadata": { "labels": labels } } }))
    };
    let reannotate = |annotations: Value| {
        Remedy::Claim(
            json!({ "spec": { "additionalPodMetadata": { "annotations": annotations } } }),
        )
    };
    vec![
        refusal(
            "restricted-label",
            "InvalidMetadata",
            &["spec.additionalPodMetadata.labels", "kubernetes.io/x"],
            relabel(json!({ "kubernetes.io/x": null, "team": "ml" })),
            |claim, _| labels(claim, "kubernetes.io/x", "y"),
        ),
        refusal(
            "restricted-annotation",
            "InvalidMetadata",
            &[
                "spec.additionalPodMetadata.annotations",
                "extensions.agents.x-k8s.io/x",
            ],
            reannotate(json!({ "extensions.agents.x-k8s.io/x": null })),
            |claim, _| annotations(claim, "extensions.agents.x-k8s.io/x", "y"),
        ),
        refusal(
            "invalid-label-value",
            "InvalidMetadata",
            &["spec.additionalPodMetadata.labels", "\"team\""],
            relabel(json!({ "team": "ml" })),
            |claim, _| labels(claim, "team", "not a label's value"),
        ),
        refusal(
            "invalid-key",
            "InvalidMetadata",
            &["spec.additionalPodMetadata.annotations", "\"no key\""],
            reannotate(json!({ "no key": null })),
            |claim, _| annotations(claim, "no key", "x"),
        ),
        refusal(
            "label-of-the-template",
            "InvalidMetadata",
            &["\"app\"", "\"web\"", "\"api\""],
            relabel(json!({ "app": "web" })),
            |claim, template| {
                labels(claim, "app", "api");
                template.spec.pod_template.metadata.labels =
                    Some([("app".to_owned(), "web".to_owned())].into());
            },
        ),
        refusal(
            "annotation-of-the-template",
            "InvalidMetadata",
            &["spec.additionalPodMetadata.annotations", "\"note\""],
            Remedy::Template(
                json!({ "spec": { "podTemplate": { "metadata": { "annotations": { "note": null } } } } }),
            ),
            |claim, template| {
                annotations(claim, "note", "the claim's");
                template.spec.pod_template.metadata.annotations =
                    Some([("note".to_owned(), "the template's".to_owned())].into());
            },
        ),
    ]
}

fn env_refusals() -> Vec<Refusal> {
    use EnvVarsInjectionPolicy::{Allowed, Overrides};
    const REJECTED: &str = "EnvVarsInjectionRejected";
    let policy = |policy| Remedy::Template(json!({ "spec": { "envVarsInjectionPolicy": policy } }));
    let allow = |template: &mut SandboxTemplate| {
        template.spec.env_vars_injection_policy = Some(Allowed);
    };
    vec![
        refusal(
            "env-of-a-warm-one",
            REJECTED,
            &["spec.env", "spec.warmpool", "\"none\""],
            Remedy::Claim(json!({ "spec": { "warmpool": "none" } })),
            |claim, template| {
                env(claim, "FLAG", None);
                claim.spec.warmpool = None;
                allow(template);
            },
        ),
        refusal(
            "env-disallowed",
            REJECTED,
            &["spec.env", "envVarsInjectionPolicy"],
            policy(Allowed),
            |claim, _| env(claim, "FLAG", None),
        ),
        refusal(
            "env-set-already",
            REJECTED,
            &["spec.env", "\"MODE\"", "\"main\"", "Overrides"],
            policy(Overrides),
            |claim, template| {
                env(claim, "MODE", Some("main"));
                allow(template);
            },
        ),
        refusal(
            "env-of-no-container",
            REJECTED,
            &["spec.env", "\"sidecar\"", "\"FLAG\""],
            Remedy::Claim(
                json!({ "spec": { "env": [{ "name": "FLAG", "value": "1", "containerName": "main" }] } }),
            ),
            |claim, template| {
                env(claim, "FLAG", Some("sidecar"));
                allow(template);
            },
        ),
        refusal(
            "env-without-a-name",
            REJECTED,
            &["spec.env", "\"A=B\""],
            Remedy::Claim(json!({ "spec": { "env": [{ "name": "A", "value": "1" }] } })),
            |claim, template| {
                env(claim, "A=B", None);
                allow(template);
            },
        ),
    ]
}

fn volume_refusals() -> Vec<Refusal> {
    use VolumeClaimTemplatesPolicy::{Allowed, Overrides};
    const REFUSED: &str = "VolumeClaimTemplatesError";
    let policy =
        |policy| Remedy::Template(json!({ "spec": { "volumeClaimTemplatesPolicy": policy } }));
    let allow = |template: &mut SandboxTemplate| {
        template.spec.volume_claim_templates_policy = Some(Allowed);
    };
    vec![
        refusal(
            "volumes-disallowed",
            REFUSED,
            &["spec.volumeClaimTemplates", "volumeClaimTemplatesPolicy"],
            policy(Allowed),
            |claim, _| claim.spec.volume_claim_templates = Some(vec![volume(Some("data"), "1Gi")]),
        ),
        refusal(
            "volume-of-the-template",
            REFUSED,
            &["spec.volumeClaimTemplates", "\"data\"", "Overrides"],
            policy(Overrides),
            |claim, template| {
                claim.spec.volume_claim_templates = Some(vec![volume(Some("data"), "5Gi")]);
                template.spec.volume_claim_templates = Some(vec![volume(Some("data"), "1Gi")]);
                allow(template);
            },
        ),
        refusal(
            "volume-twice",
            REFUSED,
            &["spec.volumeClaimTemplates", "\"data\""],
            Remedy::Claim(
                json!({ "spec": { "volumeClaimTemplates": [volume(Some("data"), "1Gi")] } }),
            ),
            |claim, template| {
                claim.spec.volume_claim_templates = Some(vec![
                    volume(Some("data"), "1Gi"),
                    volume(Some("data"), "2Gi"),
                ]);
                allow(template);
            },
        ),
        refusal(
            "volume-without-a-name",
            REFUSED,
            &["spec.volumeClaimTemplates[0]", "metadata.name"],
            Remedy::Claim(
                json!({ "spec": { "volumeClaimTemplates": [volume(Some("data"), "1Gi")] } }),
            ),
            |claim, template| {
                claim.spec.volume_claim_templates = Some(vec![volume(None, "1Gi")]);
                allow(template);
            },
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_names_the_problem_and_correcting_it_is_enough() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    let unrelated = SandboxSpec {
        pod_template: template("x").spec.pod_template,
        ..SandboxSpec::default()
    };
    let namesake = cluster.create(&Sandbox::new("name-taken", unrelated)).await;
    let mut refusals = metadata_refusals();
    refusals.extend(env_refusals());
    refusals.extend(volume_refusals());
    refusals.push(refusal(
        "name-taken",
        "ReconcilerError",
        &["Sandbox", "\"name-taken\"", "no controller"],
        Remedy::DeleteSandbox("name-taken"),
        |claim, _| claim.spec.warmpool = Some("none".into()),
    ));
    for refusal in &refusals {
        cluster.create(&refusal.template).await;
        cluster.create(&refusal.claim).await;
    }
    for refusal in &refusals {
        let name = refusal.claim.name_any();
        let refused = cluster.claim_with(&name, "False", refusal.reason).await;
        let message = message_of(&refused);
        for part in refusal.names {
            assert!(
                message.contains(part),
                "{name}: {part} is not in: {message}"
            );
        }
        let sandbox = cluster.get::<Sandbox>(&name).await;
        assert_eq!(
            sandbox.and_then(|sandbox| sandbox.uid()),
            namesake.uid().filter(|_| name == "name-taken"),
            "{name} was refused and has a sandbox all the same"
        );
    }
    for refusal in refusals {
        let name = refusal.claim.name_any();
        match refusal.remedy {
            Remedy::Claim(patch) => drop(cluster.patch::<SandboxClaim>(&name, patch).await),
            Remedy::Template(patch) => drop(cluster.patch::<SandboxTemplate>(&name, patch).await),
            Remedy::DeleteSandbox(sandbox) => cluster.delete::<Sandbox>(sandbox).await,
        }
        cluster.claim_ready(&name).await;
    }

    let overridden = cluster.get::<Sandbox>("env-set-already").await.unwrap();
    let env = overridden.spec.pod_template.spec.containers[0].env.clone();
    assert_eq!(env.unwrap()[0].value.as_deref(), Some("claim"));
    let replaced = cluster.get::<Sandbox>("volume-of-the-template").await;
    let volumes = replaced.unwrap().spec.volume_claim_templates.unwrap();
    assert_eq!(volumes, [volume(Some("data"), "5Gi")]);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_waits_for_its_template_and_its_pool() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&claim("by-template", "py")).await;
    cluster.create(&claim_from("by-pool", "warm")).await;
    let waiting = cluster
        .claim_with("by-template", "False", "TemplateNotFound")
        .await;
    assert_eq!(message_of(&waiting), "SandboxTemplate \"py\" not found");
    cluster
        .claim_with("by-pool", "False", "WarmPoolNotFound")
        .await;
    cluster.create(&template("py")).await;
    cluster.claim_ready("by-template").await;
    cluster.create(&pool("warm", "py", 0)).await;
    cluster.claim_ready("by-pool").await;
    controllers.stop().await;
    cluster.stop().await;
}

/// Claims that the API server refuses to create.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_makes_no_sense_is_refused_by_its_schema() {
    let cluster = Cluster::start().await;
    let kind = ApiResource::erase::<SandboxClaim>(&());
    let claims =
        kube::Api::<DynamicObject>::namespaced_with(cluster.client.clone(), NAMESPACE, &kind);
    let by_template = json!({ "sandboxTemplateRef": { "name": "py" } });
    let with = |field: &str, value: Value| {
        let mut spec = by_template.clone();
        spec[field] = value;
        spec
    };
    let table = [
        (json!({}), "sandboxTemplateRef"),
        (
            with("warmPoolRef", json!({ "name": "warm" })),
            "warmPoolRef",
        ),
        (
            json!({ "warmPoolRef": { "name": "warm" }, "warmpool": "none" }),
            "warmpool",
        ),
        (
            json!({ "sandboxTemplateRef": {} }),
            "spec.sandboxTemplateRef.name",
        ),
        (
            with("lifecycle", json!({ "shutdownPolicy": "Whenever" })),
            "spec.lifecycle.shutdownPolicy",
        ),
        (
            with("lifecycle", json!({ "ttlSecondsAfterFinished": -1 })),
            "spec.lifecycle.ttlSecondsAfterFinished",
        ),
        (
            with("lifecycle", json!({ "shutdownTime": "tomorrow" })),
            "spec.lifecycle.shutdownTime",
        ),
        (with("env", json!([{ "name": "A" }])), "spec.env[0].value"),
        (with("env", json!([{ "value": "1" }])), "spec.env[0].name"),
    ];
    for (spec, field) in table {
        let claim = json!({
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": { "name": "refused" },
            "spec": spec,
        });
        let claim: DynamicObject = serde_json::from_value(claim).unwrap();
        let refusal = claims.create(&PostParams::default(), &claim).await;
        let Err(kube::Error::Api(status)) = refusal else {
            panic!("{spec} was accepted");
        };
        assert_eq!(status.code, 422, "{spec}: {}", status.message);
        assert!(status.message.contains(field), "{spec}: {}", status.message);
    }
    cluster.stop().await;
}
