//! The cost of single requests without disk and network: an in-process client and a server in memory. `agent-sandbox bench api`
//! measures durable writes, many clients and HTTPS.

use std::hint::black_box;

use apiserver::{Config, Server};
use criterion::{Criterion, criterion_group, criterion_main};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::runtime::Runtime;

const LISTED: usize = 1000;

fn config_map(name: &str) -> ConfigMap {
    let object = json!({"metadata": {"name": name, "labels": {"app": "bench"}}, "data": {"text": "x".repeat(2048)}});
    serde_json::from_value(object).expect("the object is well formed")
}

fn requests(criterion: &mut Criterion) {
    let runtime = Runtime::new().expect("cannot start the runtime");
    let (_server, maps) = runtime.block_on(async {
        let server = Server::open(Config::in_memory())
            .await
            .expect("cannot open the server");
        let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
        for number in 0..LISTED {
            let map = config_map(&format!("listed-{number}"));
            maps.create(&PostParams::default(), &map)
                .await
                .expect("created");
        }
        (server, maps)
    });
    criterion.bench_function("get", |bencher| {
        bencher.iter(|| {
            runtime.block_on(async { black_box(maps.get("listed-1").await.expect("read")) })
        });
    });
    criterion.bench_function("list of 1,000", |bencher| {
        let everything = ListParams::default();
        bencher.iter(|| {
            runtime.block_on(async { black_box(maps.list(&everything).await.expect("listed")) })
        });
    });
    criterion.bench_function("merge patch", |bencher| {
        let mut number = 0;
        bencher.iter(|| {
            number += 1;
            let patch =
                Patch::Merge(json!({"metadata": {"annotations": {"number": number.to_string()}}}));
            runtime.block_on(async {
                black_box(
                    maps.patch("listed-2", &PatchParams::default(), &patch)
                        .await
                        .expect("patched"),
                )
            })
        });
    });
    criterion.bench_function("server-side apply", |bencher| {
        let mut number = 0;
        bencher.iter(|| {
            number += 1;
            let patch = Patch::Apply(json!({"apiVersion": "v1", "kind": "ConfigMap", "data": {"number": number.to_string()}}));
            let manager = PatchParams::apply("bench");
            runtime.block_on(async {
                black_box(maps.patch("listed-3", &manager, &patch).await.expect("applied"))
            })
        });
    });
}

criterion_group!(benches, requests);
criterion_main!(benches);
