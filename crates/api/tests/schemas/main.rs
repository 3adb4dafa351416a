//! The generated CRDs: a Kubernetes API server accepts them, accepts valid manifests, and refuses invalid ones with a message
//! that names the field.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kubernetes_types;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use apimachinery::schema::Schema;
use serde::Deserialize;
use serde_json::{Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn documents(path: &Path) -> Vec<Value> {
    let text =
        fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| Value::deserialize(document).unwrap())
        .collect()
}

fn files(directory: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

/// The schema of every served version as it is written in the CRDs, by apiVersion and kind.
fn written_schemas() -> BTreeMap<(String, String), Value> {
    let mut paths = files(&root().join("deploy/crds"));
    paths.push(root().join("deploy/kruise/crds.yaml"));
    let mut schemas = BTreeMap::new();
    for crd in paths.iter().flat_map(|path| documents(path)) {
        let spec = &crd["spec"];
        for version in spec["versions"].as_array().unwrap() {
            let api_version = format!(
                "{}/{}",
                spec["group"].as_str().unwrap(),
                version["name"].as_str().unwrap()
            );
            let kind = spec["names"]["kind"].as_str().unwrap().to_owned();
            let schema = version["schema"]["openAPIV3Schema"].clone();
            schemas.insert((api_version, kind), schema);
        }
    }
    schemas
}

/// The compiled schema of every served version, by apiVersion and kind.
fn schemas() -> BTreeMap<(String, String), Schema> {
    written_schemas()
        .into_iter()
        .map(|(name, schema)| {
            let compiled = Schema::compile(&schema, "spec.validation")
                .unwrap_or_else(|errors| panic!("{name:?} is not structural: {errors:#?}"));
            (name, compiled)
        })
        .collect()
}

fn schema_of(schemas: &BTreeMap<(String, String), Schema>, object: &Value) -> Schema {
    let text = |field: &str| object[field].as_str().unwrap().to_owned();
    schemas[&(text("apiVersion"), text("kind"))].clone()
}

#[test]
fn every_crd_is_structural_and_serves_what_clients_ask_for() {
    let served: Vec<String> = schemas()
        .into_keys()
        .map(|(api_version, kind)| format!("{api_version} {kind}"))
        .collect();
    assert_eq!(
        served,
        [
            "agents.kruise.io/v1alpha1 SandboxClaim",
            "agents.kruise.io/v1alpha1 SandboxSet",
            "agents.x-k8s.io/v1alpha1 Sandbox",
            "agents.x-k8s.io/v1beta1 Sandbox",
            "extensions.agents.x-k8s.io/v1alpha1 SandboxClaim",
            "extensions.agents.x-k8s.io/v1alpha1 SandboxTemplate",
            "extensions.agents.x-k8s.io/v1alpha1 SandboxWarmPool",
            "extensions.agents.x-k8s.io/v1beta1 SandboxClaim",
            "extensions.agents.x-k8s.io/v1beta1 SandboxTemplate",
            "extensions.agents.x-k8s.io/v1beta1 SandboxWarmPool",
        ]
    );
}

#[test]
fn valid_manifests_are_accepted_without_pruning() {
    let schemas = schemas();
    let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/manifests");
    for path in ["x-k8s", "kruise"]
        .iter()
        .flat_map(|dialect| files(&manifests.join(dialect)))
    {
        for object in documents(&path) {
            let schema = schema_of(&schemas, &object);
            let mut pruned = object.clone();
            assert_eq!(
                schema.prune_reporting(&mut pruned),
                [""; 0],
                "{}",
                path.display()
            );
            assert_eq!(pruned, object, "{}", path.display());
            schema.default(&mut pruned);
            assert_eq!(schema.validate(&pruned), [], "{}", path.display());
        }
    }
}

#[test]
fn defaults_are_those_of_the_specification() {
    let schemas = schemas();
    let defaulted = |api_version: &str, kind: &str, spec: Value| {
        let mut object = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "x"}, "spec": spec});
        schema_of(&schemas, &object).default(&mut object);
        object["spec"].clone()
    };
    let extensions = "extensions.agents.x-k8s.io/v1beta1";
    let pod = json!({"spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80}]}]}});

    let sandbox = defaulted(
        "agents.x-k8s.io/v1beta1",
        "Sandbox",
        json!({"podTemplate": pod}),
    );
    assert_eq!(sandbox["replicas"], 1);
    assert_eq!(sandbox["shutdownPolicy"], "Retain");
    assert_eq!(sandbox["operatingMode"], Value::Null);
    assert_eq!(
        sandbox["podTemplate"]["spec"]["containers"][0]["ports"][0]["protocol"],
        "TCP"
    );

    let template = defaulted(extensions, "SandboxTemplate", json!({"podTemplate": pod}));
    assert_eq!(template["networkPolicyManagement"], "Managed");
    assert_eq!(template["envVarsInjectionPolicy"], "Disallowed");
    assert_eq!(template["volumeClaimTemplatesPolicy"], "Disallowed");

    let claim = defaulted(
        extensions,
        "SandboxClaim",
        json!({"sandboxTemplateRef": {"name": "t"}, "lifecycle": {}}),
    );
    assert_eq!(claim["lifecycle"]["shutdownPolicy"], "Retain");
    assert_eq!(
        claim["warmpool"],
        Value::Null,
        "an absent warmpool means default, so that warmPoolRef can be used alone"
    );

    let pool = defaulted(
        extensions,
        "SandboxWarmPool",
        json!({"sandboxTemplateRef": {"name": "t"}, "updateStrategy": {}}),
    );
    assert_eq!(pool["replicas"], 1);
    assert_eq!(pool["updateStrategy"]["type"], "OnReplenish");

    let kruise = defaulted(
        "agents.kruise.io/v1alpha1",
        "SandboxClaim",
        json!({"templateName": "t"}),
    );
    assert_eq!(kruise["replicas"], 1);
}

#[test]
#[expect(clippy::too_many_lines, reason = "one table of every bound")]
fn each_bound_and_enum_is_enforced_with_the_field_in_the_message() {
    let schemas = schemas();
    let core = "agents.x-k8s.io/v1beta1";
    let extensions = "extensions.agents.x-k8s.io/v1beta1";
    let kruise = "agents.kruise.io/v1alpha1";
    let pod = json!({"spec": {"containers": [{"name": "c"}]}});
    let template_ref = json!({"name": "t"});
    let cases = [
        (
            core,
            "Sandbox",
            json!({}),
            "spec.podTemplate: Required value",
        ),
        (
            core,
            "Sandbox",
            json!({"podTemplate": {}}),
            "spec.podTemplate.spec: Required value",
        ),
        (
            core,
            "Sandbox",
            json!({"podTemplate": {"spec": {}}}),
            "spec.podTemplate.spec.containers: Required value",
        ),
        (
            core,
            "Sandbox",
            json!({"podTemplate": pod, "replicas": 2}),
            "spec.replicas: Invalid value: 2: spec.replicas in body should be less than or equal to 1",
        ),
        (
            core,
            "Sandbox",
            json!({"podTemplate": pod, "replicas": -1}),
            "spec.replicas: Invalid value: -1: spec.replicas in body should be greater than or equal to 0",
        ),
        (
            core,
            "Sandbox",
            json!({"podTemplate": pod, "shutdownPolicy": "Keep"}),
            r#"spec.shutdownPolicy: Unsupported value: "Keep": supported values: "Delete", "Retain""#,
        ),
        (
            core,
            "Sandbox",
            json!({"podTemplate": pod, "operatingMode": "Paused"}),
            r#"spec.operatingMode: Unsupported value: "Paused": supported values: "Running", "Suspended""#,
        ),
        (
            core,
            "Sandbox",
            json!({"podTemplate": pod, "shutdownTime": "tomorrow"}),
            r#"spec.shutdownTime: Invalid value: "tomorrow""#,
        ),
        (
            extensions,
            "SandboxClaim",
            json!({"sandboxTemplateRef": {"name": ""}}),
            r#"spec.sandboxTemplateRef.name: Invalid value: "": spec.sandboxTemplateRef.name in body should be at least 1 chars long"#,
        ),
        (
            extensions,
            "SandboxClaim",
            json!({"warmPoolRef": {"name": ""}}),
            r#"spec.warmPoolRef.name: Invalid value: "": spec.warmPoolRef.name in body should be at least 1 chars long"#,
        ),
        (
            extensions,
            "SandboxWarmPool",
            json!({"sandboxTemplateRef": {"name": ""}}),
            r#"spec.sandboxTemplateRef.name: Invalid value: "": spec.sandboxTemplateRef.name in body should be at least 1 chars long"#,
        ),
        (
            kruise,
            "SandboxSet",
            json!({"replicas": 1, "templateRef": {"name": ""}}),
            r#"spec.templateRef.name: Invalid value: "": spec.templateRef.name in body should be at least 1 chars long"#,
        ),
        (
            core,
            "Sandbox",
            json!({"podTemplate": {"spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "much"}}}]}}}),
            r#"spec.podTemplate.spec.containers[0].resources.limits.cpu: Invalid value: "much""#,
        ),
        (
            core,
            "Sandbox",
            json!({"podTemplate": {"spec": {"containers": [{"name": "c"}, {"name": "c"}]}}}),
            "spec.podTemplate.spec.containers[1]: Duplicate value",
        ),
        (
            extensions,
            "SandboxTemplate",
            json!({"podTemplate": pod, "networkPolicyManagement": "Mine"}),
            r#"spec.networkPolicyManagement: Unsupported value: "Mine": supported values: "Managed", "Unmanaged""#,
        ),
        (
            extensions,
            "SandboxTemplate",
            json!({"podTemplate": pod, "envVarsInjectionPolicy": "Yes"}),
            r#"spec.envVarsInjectionPolicy: Unsupported value: "Yes": supported values: "Allowed", "Overrides", "Disallowed""#,
        ),
        (
            extensions,
            "SandboxTemplate",
            json!({"podTemplate": pod, "volumeClaimTemplatesPolicy": "Yes"}),
            r#"spec.volumeClaimTemplatesPolicy: Unsupported value: "Yes": supported values: "Disallowed", "Allowed", "Overrides""#,
        ),
        (
            extensions,
            "SandboxClaim",
            json!({"sandboxTemplateRef": {}}),
            "spec.sandboxTemplateRef.name: Required value",
        ),
        (
            extensions,
            "SandboxClaim",
            json!({"sandboxTemplateRef": template_ref, "env": [{"name": "A"}]}),
            "spec.env[0].value: Required value",
        ),
        (
            extensions,
            "SandboxClaim",
            json!({"sandboxTemplateRef": template_ref, "lifecycle": {"ttlSecondsAfterFinished": -1}}),
            "spec.lifecycle.ttlSecondsAfterFinished: Invalid value: -1: spec.lifecycle.ttlSecondsAfterFinished in body should be greater than or equal to 0",
        ),
        (
            extensions,
            "SandboxClaim",
            json!({"sandboxTemplateRef": template_ref, "lifecycle": {"shutdownPolicy": "Drop"}}),
            r#"spec.lifecycle.shutdownPolicy: Unsupported value: "Drop": supported values: "Delete", "DeleteForeground", "Retain""#,
        ),
        (
            extensions,
            "SandboxWarmPool",
            json!({"replicas": 1}),
            "spec.sandboxTemplateRef: Required value",
        ),
        (
            extensions,
            "SandboxWarmPool",
            json!({"replicas": -1, "sandboxTemplateRef": template_ref}),
            "spec.replicas: Invalid value: -1: spec.replicas in body should be greater than or equal to 0",
        ),
        (
            extensions,
            "SandboxWarmPool",
            json!({"sandboxTemplateRef": template_ref, "updateStrategy": {"type": "Never"}}),
            r#"spec.updateStrategy.type: Unsupported value: "Never": supported values: "Recreate", "OnReplenish", "RollingUpdate""#,
        ),
        (
            extensions,
            "SandboxWarmPool",
            json!({"sandboxTemplateRef": template_ref, "updateStrategy": {"maxUnavailable": "banana"}}),
            r#"spec.updateStrategy.maxUnavailable: Invalid value: "banana""#,
        ),
        (
            extensions,
            "SandboxWarmPool",
            json!({"sandboxTemplateRef": template_ref, "updateStrategy": {"maxUnavailable": "-5"}}),
            r#"spec.updateStrategy.maxUnavailable: Invalid value: "-5""#,
        ),
        (
            extensions,
            "SandboxWarmPool",
            json!({"sandboxTemplateRef": template_ref, "updateStrategy": {"maxUnavailable": -3}}),
            "spec.updateStrategy.maxUnavailable: Invalid value: -3: spec.updateStrategy.maxUnavailable in body should be greater than or equal to 0",
        ),
        (
            kruise,
            "SandboxSet",
            json!({"replicas": 1, "template": pod, "updateStrategy": {"maxUnavailable": -3}}),
            "spec.updateStrategy.maxUnavailable: Invalid value: -3",
        ),
        (
            kruise,
            "SandboxClaim",
            json!({"templateName": ""}),
            r#"spec.templateName: Invalid value: "": spec.templateName in body should be at least 1 chars long"#,
        ),
        (
            kruise,
            "SandboxClaim",
            json!({"templateName": "t", "replicas": 0}),
            "spec.replicas: Invalid value: 0: spec.replicas in body should be greater than or equal to 1",
        ),
        (
            kruise,
            "SandboxClaim",
            json!({"templateName": "t", "claimTimeout": "soon"}),
            r#"spec.claimTimeout: Invalid value: "soon""#,
        ),
        (
            kruise,
            "SandboxClaim",
            json!({"templateName": "t", "ttlAfterCompleted": "-1h"}),
            r#"spec.ttlAfterCompleted: Invalid value: "-1h""#,
        ),
        (
            kruise,
            "SandboxSet",
            json!({"replicas": -1, "template": pod}),
            "spec.replicas: Invalid value: -1: spec.replicas in body should be greater than or equal to 0",
        ),
    ];
    for (api_version, kind, spec, expected) in cases {
        let object = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "x"}, "spec": spec});
        let mut defaulted = object.clone();
        let schema = schema_of(&schemas, &object);
        schema.default(&mut defaulted);
        let messages: Vec<String> = schema
            .validate(&defaulted)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert!(
            messages.len() == 1 && messages[0].starts_with(expected),
            "{object}\nexpected {expected}\nfound {messages:?}"
        );
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn a_number_that_does_not_fit_its_go_type_is_refused_by_the_schema() {
    let schemas = schemas();
    let core = "agents.x-k8s.io/v1beta1";
    let extensions = "extensions.agents.x-k8s.io/v1beta1";
    let big = 3_000_000_000_u64;
    let pod = |spec: Value| json!({"podTemplate": {"spec": spec}});
    let containers = json!([{"name": "c"}]);
    let template = json!({"name": "t"});
    let cases = [
        (
            core,
            "Sandbox",
            pod(json!({"containers": [{"name": "c", "ports": [{"containerPort": big}]}]})),
            "spec.podTemplate.spec.containers[0].ports[0].containerPort",
        ),
        (
            core,
            "Sandbox",
            pod(
                json!({"containers": [{"name": "c", "livenessProbe": {"periodSeconds": -3_000_000_000_i64}}]}),
            ),
            "spec.podTemplate.spec.containers[0].livenessProbe.periodSeconds",
        ),
        (
            core,
            "Sandbox",
            pod(
                json!({"containers": [{"name": "c", "livenessProbe": {"httpGet": {"port": big}}}]}),
            ),
            "spec.podTemplate.spec.containers[0].livenessProbe.httpGet.port",
        ),
        (
            core,
            "Sandbox",
            pod(serde_json::from_str(
                r#"{"containers": [{"name": "c"}], "activeDeadlineSeconds": 99999999999999999999}"#,
            )
            .unwrap()),
            "spec.podTemplate.spec.activeDeadlineSeconds",
        ),
        (
            core,
            "Sandbox",
            pod(
                json!({"containers": containers, "activeDeadlineSeconds": 9_223_372_036_854_775_808_u64}),
            ),
            "spec.podTemplate.spec.activeDeadlineSeconds",
        ),
        (
            core,
            "Sandbox",
            pod(json!({"containers": containers, "priority": 1.5})),
            "spec.podTemplate.spec.priority",
        ),
        (
            extensions,
            "SandboxClaim",
            json!({"sandboxTemplateRef": template, "lifecycle": {"ttlSecondsAfterFinished": 2_147_483_648_u64}}),
            "spec.lifecycle.ttlSecondsAfterFinished",
        ),
        (
            extensions,
            "SandboxWarmPool",
            json!({"sandboxTemplateRef": template, "replicas": big}),
            "spec.replicas",
        ),
        (
            extensions,
            "SandboxWarmPool",
            json!({"sandboxTemplateRef": template, "updateStrategy": {"maxUnavailable": big}}),
            "spec.updateStrategy.maxUnavailable",
        ),
        (
            extensions,
            "SandboxTemplate",
            json!({"podTemplate": {"spec": {"containers": containers}}, "networkPolicy": {"egress": [{"ports": [{"port": big}]}]}}),
            "spec.networkPolicy.egress[0].ports[0].port",
        ),
        (
            extensions,
            "SandboxTemplate",
            json!({"podTemplate": {"spec": {"containers": containers}}, "networkPolicy": {"ingress": [{"ports": [{"endPort": big}]}]}}),
            "spec.networkPolicy.ingress[0].ports[0].endPort",
        ),
        (
            "agents.kruise.io/v1alpha1",
            "SandboxClaim",
            json!({"templateName": "t", "replicas": big}),
            "spec.replicas",
        ),
    ];
    for (api_version, kind, spec, field) in cases {
        let object = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "x"}, "spec": spec});
        let schema = schema_of(&schemas, &object);
        let errors = schema.validate(&object);
        assert!(
            errors.iter().any(|error| error.field == field),
            "{object}: {errors:?}"
        );
        // Validation ratcheting: an object that an earlier version accepted can still be changed in other fields.
        let mut changed = object.clone();
        changed["status"] = json!({});
        assert_eq!(schema.validate_update(&changed, &object), [], "{object}");
    }
}

#[test]
fn a_time_that_means_never_is_accepted() {
    let schemas = schemas();
    let sandbox = json!({"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "x"},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "c"}]}}, "shutdownTime": "9999-12-31T23:59:59Z"}});
    assert_eq!(schema_of(&schemas, &sandbox).validate(&sandbox), []);
}

#[test]
fn a_whole_float_is_stored_as_an_integer() {
    let schemas = schemas();
    let mut pool: Value = serde_json::from_str(
        r#"{"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool", "metadata": {"name": "x"},
            "spec": {"sandboxTemplateRef": {"name": "t"}, "replicas": 2.0, "updateStrategy": {"maxUnavailable": 1e1}}}"#,
    )
    .unwrap();
    let schema = schema_of(&schemas, &pool);
    schema.prune(&mut pool);
    assert_eq!(schema.validate(&pool), []);
    assert_eq!(pool["spec"]["replicas"].as_i64(), Some(2));
    assert_eq!(
        pool["spec"]["updateStrategy"]["maxUnavailable"].as_i64(),
        Some(10)
    );
}

#[test]
fn an_amount_is_a_number_or_a_percentage() {
    let schemas = schemas();
    for amount in [json!(0), json!(5), json!("5"), json!("25%"), json!("100%")] {
        let pool = json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool", "metadata": {"name": "x"},
            "spec": {"sandboxTemplateRef": {"name": "t"}, "updateStrategy": {"maxUnavailable": amount}},
        });
        assert_eq!(schema_of(&schemas, &pool).validate(&pool), [], "{amount}");
    }
}

#[test]
fn cel_rules_refuse_invalid_combinations_of_fields() {
    let schemas = schemas();
    let extensions = "extensions.agents.x-k8s.io/v1beta1";
    let (template, pool) = (json!({"name": "t"}), json!({"name": "p"}));
    let one_ref = "exactly one of sandboxTemplateRef and warmPoolRef must be set";
    let cases = [
        (extensions, "SandboxClaim", json!({}), one_ref),
        (
            extensions,
            "SandboxClaim",
            json!({"sandboxTemplateRef": template, "warmPoolRef": pool}),
            one_ref,
        ),
        (
            extensions,
            "SandboxClaim",
            json!({"warmPoolRef": pool, "warmpool": "p"}),
            "spec.warmpool",
        ),
        (
            "agents.kruise.io/v1alpha1",
            "SandboxSet",
            json!({"replicas": 1}),
            "exactly one of template and templateRef",
        ),
    ];
    for (api_version, kind, spec, expected) in cases {
        let object = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": "x"}, "spec": spec});
        let messages = broken_rules(&schemas, &object, None);
        assert!(
            messages.len() == 1
                && messages[0].starts_with("spec")
                && messages[0].contains(expected),
            "{object}\nexpected {expected}\nfound {messages:?}"
        );
    }
    for spec in [
        json!({"sandboxTemplateRef": template, "warmpool": "none"}),
        json!({"warmPoolRef": pool}),
    ] {
        let claim = json!({"apiVersion": extensions, "kind": "SandboxClaim", "metadata": {"name": "x"}, "spec": spec});
        assert_eq!(broken_rules(&schemas, &claim, None), [""; 0], "{claim}");
    }
}

#[test]
fn changes_of_immutable_fields_are_refused() {
    let schemas = schemas();
    let sandbox = |templates: Option<&str>| {
        let mut spec = json!({"podTemplate": {"spec": {"containers": [{"name": "c"}]}}});
        if let Some(name) = templates {
            spec["volumeClaimTemplates"] =
                json!([{"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"]}}]);
        }
        json!({"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "x"}, "spec": spec})
    };
    let expected = "volumeClaimTemplates is immutable";
    for (old, new) in [(Some("a"), Some("b")), (None, Some("a")), (Some("a"), None)] {
        let messages = broken_rules(&schemas, &sandbox(new), Some(&sandbox(old)));
        assert!(
            messages.len() == 1 && messages[0].contains(expected),
            "{old:?} to {new:?}: {messages:?}"
        );
    }
    assert_eq!(
        broken_rules(&schemas, &sandbox(Some("a")), Some(&sandbox(Some("a")))),
        [""; 0]
    );

    let claim = |replicas: i32| {
        json!({
            "apiVersion": "agents.kruise.io/v1alpha1", "kind": "SandboxClaim", "metadata": {"name": "x"},
            "spec": {"templateName": "t", "replicas": replicas},
        })
    };
    let messages = broken_rules(&schemas, &claim(3), Some(&claim(2)));
    assert!(
        messages.len() == 1
            && messages[0].starts_with("spec.replicas: Invalid value")
            && messages[0].ends_with("replicas is immutable"),
        "{messages:?}"
    );
    assert_eq!(broken_rules(&schemas, &claim(2), Some(&claim(2))), [""; 0]);
}

fn broken_rules(
    schemas: &BTreeMap<(String, String), Schema>,
    object: &Value,
    old: Option<&Value>,
) -> Vec<String> {
    let schema = schema_of(schemas, object);
    assert_eq!(schema.validate(object), [], "{object}");
    let errors = schema.validate_rules(object, old);
    errors.iter().map(ToString::to_string).collect()
}
