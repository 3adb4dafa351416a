//! The objects of a load: its namespaces with templates, pools and autoscalers, and the claims or sandboxes.

use anyhow::{Context, bail};
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde_json::{Value, json};

use super::drive::DEADLINE;
use super::recipe::{Autoscaling, Makes, Recipe};
use crate::ready_times::HasConditions;

/// The name of template, pool and autoscaler, and the prefix of all other names.
pub const NAME: &str = "load";
/// The label of every object of a load.
const GROUP: (&str, &str) = ("group", "agent-sandbox-load-test");

/// The target of a load.
#[derive(Clone)]
pub struct Place {
    pub client: Client,
    pub namespaces: Vec<String>,
    /// The image and command of the sandboxes.
    pub image: String,
    pub command: Vec<String>,
}

impl Place {
    fn pod_template(&self) -> Value {
        let container = json!({ "name": "main", "image": self.image, "command": self.command });
        let (key, value) = GROUP;
        json!({
            "metadata": { "labels": { key: value } },
            "spec": { "containers": [container], "terminationGracePeriodSeconds": 0 },
        })
    }
}

/// A kind that a load creates.
pub trait Loaded:
    HasConditions + Resource<Scope = NamespaceResourceScope> + Serialize + Sync + 'static
{
    /// An object of this kind for a recipe.
    fn load(name: &str, recipe: &Recipe, place: &Place) -> anyhow::Result<Self>;
}

impl Loaded for SandboxClaim {
    fn load(name: &str, recipe: &Recipe, _: &Place) -> anyhow::Result<Self> {
        let spec = if recipe.pool > 0 {
            json!({ "warmPoolRef": { "name": NAME } })
        } else {
            json!({ "sandboxTemplateRef": { "name": NAME }, "warmpool": "none" })
        };
        Ok(serde_json::from_value(object::<Self>(name, &spec))?)
    }
}

impl Loaded for Sandbox {
    fn load(name: &str, _: &Recipe, place: &Place) -> anyhow::Result<Self> {
        let spec = json!({ "podTemplate": place.pod_template() });
        Ok(serde_json::from_value(object::<Self>(name, &spec))?)
    }
}

fn object<K: Resource<DynamicType = ()>>(name: &str, spec: &Value) -> Value {
    let (key, value) = GROUP;
    json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": { "name": name, "labels": { key: value } },
        "spec": spec,
    })
}

/// Creates the namespaces, and in each the objects that claims need.
pub async fn prepare(place: &Place, recipe: &Recipe) -> anyhow::Result<()> {
    for namespace in &place.namespaces {
        create_namespace(place, namespace).await?;
        if recipe.makes == Makes::Sandboxes {
            continue;
        }
        let template = json!({ "podTemplate": place.pod_template() });
        create::<SandboxTemplate>(place, namespace, template).await?;
        if recipe.pool > 0 {
            let pool = json!({ "replicas": recipe.pool, "sandboxTemplateRef": { "name": NAME } });
            create::<SandboxWarmPool>(place, namespace, pool).await?;
        }
        if let Some(autoscaling) = &recipe.autoscaling {
            let spec = autoscaler(autoscaling, namespace);
            create::<HorizontalPodAutoscaler>(place, namespace, spec).await?;
        }
    }
    Ok(())
}

/// Scales the pool by an external metric of its namespace.
fn autoscaler(autoscaling: &Autoscaling, namespace: &str) -> Value {
    json!({
        "scaleTargetRef": {
            "apiVersion": SandboxWarmPool::api_version(&()),
            "kind": SandboxWarmPool::kind(&()),
            "name": NAME,
        },
        "minReplicas": autoscaling.min_replicas,
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [{
            "type": "External",
            "external": {
                "metric": {
                    "name": autoscaling.metric,
                    "selector": { "matchLabels": { "namespace": namespace, "warmpool_name": NAME } },
                },
                "target": { "type": "AverageValue", "averageValue": autoscaling.average_value },
            },
        }],
        "behavior": { "scaleUp": { "stabilizationWindowSeconds": 0 } },
    })
}

async fn create<K>(place: &Place, namespace: &str, spec: Value) -> anyhow::Result<()>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + Serialize
        + serde::de::DeserializeOwned,
{
    let object: K = serde_json::from_value(object::<K>(NAME, &spec))?;
    let (api_version, kind) = (K::api_version(&()), K::kind(&()));
    let api = Api::<K>::namespaced(place.client.clone(), namespace);
    match api.create(&PostParams::default(), &object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => {
            bail!("the API server does not serve {kind} of {api_version}")
        }
        Err(error) => Err(error).with_context(|| format!("cannot create a {kind}")),
    }
}

async fn create_namespace(place: &Place, name: &str) -> anyhow::Result<()> {
    let mut namespace = Namespace::default();
    namespace.metadata.name = Some(name.to_owned());
    Api::<Namespace>::all(place.client.clone())
        .create(&PostParams::default(), &namespace)
        .await
        .with_context(|| {
            format!(
                "cannot create namespace {name}; a load has namespaces of its own, so that all of it can be removed"
            )
        })?;
    Ok(())
}

/// Deletes the namespaces, and waits until they are gone.
pub async fn remove_namespaces(place: &Place) -> anyhow::Result<()> {
    let namespaces = Api::<Namespace>::all(place.client.clone());
    let mut begun = Vec::new();
    for name in &place.namespaces {
        match namespaces.delete(name, &DeleteParams::default()).await {
            Ok(_) => begun.push(name),
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => {
                return Err(error).with_context(|| format!("cannot remove namespace {name}"));
            }
        }
    }
    for name in begun {
        let is_gone = |namespace: Option<&Namespace>| namespace.is_none();
        let gone = await_condition(namespaces.clone(), name, is_gone);
        tokio::time::timeout(DEADLINE, gone)
            .await
            .with_context(|| format!("namespace {name} does not go"))??;
    }
    Ok(())
}

/// Waits until every pool is full.
pub async fn await_pools(place: &Place, recipe: &Recipe) -> anyhow::Result<()> {
    if recipe.pool == 0 {
        return Ok(());
    }
    for namespace in &place.namespaces {
        let pools: Api<SandboxWarmPool> = Api::namespaced(place.client.clone(), namespace);
        let is_full = |pool: Option<&SandboxWarmPool>| {
            pool.and_then(|pool| pool.status.as_ref())
                .and_then(|status| usize::try_from(status.ready_replicas).ok())
                .is_some_and(|ready| ready >= recipe.pool)
        };
        tokio::time::timeout(DEADLINE, await_condition(pools, NAME, is_full))
            .await
            .with_context(|| {
                format!(
                    "the pool of {} did not fill within {DEADLINE:?}",
                    recipe.pool
                )
            })??;
    }
    Ok(())
}

/// The desired sandboxes of all autoscaled pools.
pub async fn desired_replicas(place: &Place, recipe: &Recipe) -> anyhow::Result<Option<usize>> {
    if recipe.autoscaling.is_none() {
        return Ok(None);
    }
    let mut desired = 0;
    for namespace in &place.namespaces {
        let pools: Api<SandboxWarmPool> = Api::namespaced(place.client.clone(), namespace);
        let pool = pools.get(NAME).await.context("cannot read a pool")?;
        desired += usize::try_from(pool.spec.replicas.unwrap_or(1)).unwrap_or_default();
    }
    Ok(Some(desired))
}

#[cfg(test)]
mod tests {
    use super::super::recipe::Name;
    use super::*;

    #[test]
    fn an_autoscaler_names_the_pool_its_bounds_and_its_metric() {
        let autoscaling = Autoscaling {
            min_replicas: 2,
            max_replicas: 50,
            metric: "claims_per_second".to_owned(),
            average_value: "1".to_owned(),
        };
        let object = object::<HorizontalPodAutoscaler>(NAME, &autoscaler(&autoscaling, "team"));
        let parsed: HorizontalPodAutoscaler = serde_json::from_value(object).unwrap();
        let spec = parsed.spec.unwrap();
        assert_eq!(spec.scale_target_ref.kind, "SandboxWarmPool");
        assert_eq!((spec.min_replicas, spec.max_replicas), (Some(2), 50));
        let metric = spec.metrics.unwrap()[0].external.clone().unwrap();
        assert_eq!(metric.metric.name, "claims_per_second");
        let labels = metric.metric.selector.unwrap().match_labels.unwrap();
        assert_eq!(labels["namespace"], "team");
        assert_eq!(metric.target.average_value.unwrap().0, "1");
    }

    #[test]
    fn a_plain_sandbox_has_its_own_pod_and_the_group_label() {
        let server = "http://localhost:1".parse().unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _within = runtime.enter();
        let place = Place {
            client: Client::try_from(kube::Config::new(server)).unwrap(),
            namespaces: vec!["a".to_owned()],
            image: "host".to_owned(),
            command: vec!["sleep".to_owned(), "infinity".to_owned()],
        };
        let sandbox = Sandbox::load("load-0", &Recipe::named(Name::Sandboxes), &place).unwrap();
        let pod = serde_json::to_value(&sandbox).unwrap()["spec"]["podTemplate"].clone();
        assert_eq!(pod["spec"]["containers"][0]["image"], "host");
        assert_eq!(
            pod["metadata"]["labels"]["group"],
            "agent-sandbox-load-test"
        );
    }
}
