use std::collections::BTreeMap;

use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxSpec};
use futures::{StreamExt, TryStreamExt};
use kube::api::{ListParams, PostParams};
use std::time::Duration;
use testkit::eventually_within;

use crate::fixture::{Fixture, status};

const SANDBOXES: usize = 5_000;

#[tokio::test(flavor = "multi_thread")]
async fn five_thousand_sandboxes_settle_with_few_writes_each() {
    let fixture = Fixture::start().await;
    let sandboxes = fixture.cluster.api::<Sandbox>();
    futures::stream::iter(0..SANDBOXES)
        .map(|number| {
            let sandbox = testkit::cluster::sandbox(&format!("s-{number}"), SandboxSpec::default());
            let sandboxes = sandboxes.clone();
            async move { sandboxes.create(&PostParams::default(), &sandbox).await }
        })
        .buffer_unordered(32)
        .try_for_each(|_| std::future::ready(Ok(())))
        .await
        .unwrap();
    eventually_within(Duration::from_secs(600), "all to be ready", async || {
        let all = sandboxes.list(&ListParams::default()).await.unwrap();
        let ready = all.items.iter().filter(|sandbox| {
            conditions::is_true(&status(sandbox).conditions, ConditionType::Ready)
        });
        (ready.count() == SANDBOXES).then_some(())
    })
    .await;

    // Events are written asynchronously and may be dropped, so they are not counted.
    let mut writes: BTreeMap<String, usize> = BTreeMap::new();
    for request in fixture.tap.seen() {
        let segments: Vec<&str> = request.path.split('/').collect();
        let creates_pod = request.path.ends_with("/pods");
        if request.is_write() && !creates_pod && !request.path.contains("events.k8s.io") {
            let name = segments.iter().find(|segment| segment.starts_with("s-"));
            *writes.entry(name.unwrap_or(&"").to_string()).or_default() += 1;
        }
    }
    let pods = fixture.tap.writes("/pods").len();
    assert_eq!(pods, SANDBOXES, "each pod is created once");
    let most = writes.values().max().copied().unwrap_or_default();
    assert!(most <= 3, "a sandbox took {most} writes beside its pod");

    // Once all are settled, a change of one sandbox causes writes for that sandbox only.
    fixture.tap.forget();
    fixture
        .patch_sandbox("s-7", serde_json::json!({"spec": {"service": true}}))
        .await;
    fixture
        .until_reported("s-7", "DependenciesReady", "Pod is Ready; Service Exists")
        .await;
    let strange: Vec<_> = fixture
        .tap
        .writes("")
        .into_iter()
        .filter(|request| !request.path.contains("events.k8s.io"))
        .filter(|request| !request.path.ends_with("/services") && !request.path.contains("/s-7"))
        .collect();
    assert!(strange.is_empty(), "{strange:?}");
    fixture.stop().await;
}
