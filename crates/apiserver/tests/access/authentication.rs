//! Who a request is from: service-account tokens, impersonation and client certificates.

use apiserver::Config;
use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::{
    authentication::v1::SelfSubjectReview,
    core::v1::{ConfigMap, Secret, ServiceAccount},
};
use kube::{
    Api, Client,
    api::{ListParams, PostParams},
};
use rcgen::ExtendedKeyUsagePurpose;
use serde_json::json;

use crate::{grant, parsed, served::Served, support::code};

#[tokio::test(flavor = "multi_thread")]
async fn a_service_account_token_is_valid_until_its_account_is_deleted() {
    let served = Served::start().await;
    let admin = served.server.client();
    grant(
        &admin,
        json!([{"verbs": ["list"], "apiGroups": [""], "resources": ["configmaps"]}]),
    )
    .await;
    let accounts: Api<ServiceAccount> = Api::default_namespaced(admin.clone());
    let request =
        parsed(json!({"metadata": {}, "spec": {"audiences": [], "expirationSeconds": 600}}));
    let issued = accounts
        .create_token_request("default", &PostParams::default(), &request)
        .await
        .unwrap();
    let client = served.connect(&issued.status.unwrap().token);
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    maps.list(&ListParams::default()).await.unwrap();
    assert_eq!(
        code(
            Api::<Secret>::default_namespaced(client)
                .list(&ListParams::default())
                .await
        ),
        403
    );
    assert_eq!(
        code(
            Api::<ConfigMap>::default_namespaced(served.connect("a.b.c"))
                .list(&ListParams::default())
                .await
        ),
        401
    );
    // A token for another audience is rejected here.
    let request =
        parsed(json!({"metadata": {}, "spec": {"audiences": ["vault"], "expirationSeconds": 600}}));
    let issued = accounts
        .create_token_request("default", &PostParams::default(), &request)
        .await
        .unwrap();
    let elsewhere = served.connect(&issued.status.unwrap().token);
    let elsewhere = Api::<ConfigMap>::default_namespaced(elsewhere);
    assert_eq!(code(elsewhere.list(&ListParams::default()).await), 401);
    accounts
        .delete("default", &kube::api::DeleteParams::default())
        .await
        .unwrap();
    assert_eq!(code(maps.list(&ListParams::default()).await), 401);
    drop((maps, accounts, admin));
    served.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn impersonation_needs_permission_and_yields_the_users_permissions() {
    let served = Served::start().await;
    let admin = served.server.client();
    let rules = json!([
        {"verbs": ["list"], "apiGroups": [""], "resources": ["configmaps"]},
        {"verbs": ["impersonate"], "apiGroups": [""], "resources": ["serviceaccounts"], "resourceNames": ["other"]},
    ]);
    grant(&admin, rules).await;
    let accounts: Api<ServiceAccount> = Api::default_namespaced(admin.clone());
    let request = parsed(json!({"metadata": {}, "spec": {"audiences": []}}));
    let issued = accounts
        .create_token_request("default", &PostParams::default(), &request)
        .await
        .unwrap();
    let token = issued.status.unwrap().token;
    let refusal = async |user: &str| {
        let client = served.connect_as(&token, Some(user));
        let maps: Api<ConfigMap> = Api::default_namespaced(client);
        match maps.list(&ListParams::default()).await {
            Err(kube::Error::Api(status)) => status.message,
            other => panic!("not refused: {other:?}"),
        }
    };
    let other = "system:serviceaccount:default:other";
    assert!(
        refusal(other)
            .await
            .contains(&format!("User \"{other}\" cannot list")),
        "the permissions of the impersonated user apply"
    );
    assert!(
        refusal("ann")
            .await
            .contains("cannot impersonate resource \"users\""),
        "no other user may be impersonated"
    );
    drop((accounts, admin));
    served.end().await;
}

/// A client certificate and its key, signed by the authority in a data directory, as `openssl` would create them.
fn certificate(
    data: &std::path::Path,
    name: &str,
    groups: &[&str],
    usage: ExtendedKeyUsagePurpose,
) -> (String, String) {
    let read =
        |file: &str| std::fs::read_to_string(data.join("pki").join(file)).expect("well formed");
    let authority_key = rcgen::KeyPair::from_pem(&read("ca.key")).expect("well formed");
    let issuer =
        rcgen::Issuer::from_ca_cert_pem(&read("ca.crt"), authority_key).expect("well formed");
    let mut wanted = rcgen::CertificateParams::default();
    wanted.distinguished_name = rcgen::DistinguishedName::new();
    wanted
        .distinguished_name
        .push(rcgen::DnType::CommonName, name);
    for group in groups {
        wanted
            .distinguished_name
            .push(rcgen::DnType::OrganizationName, *group);
    }
    wanted.extended_key_usages = vec![usage];
    let key = rcgen::KeyPair::generate().expect("well formed");
    (
        wanted.signed_by(&key, &issuer).expect("well formed").pem(),
        key.serialize_pem(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_names_a_user_and_their_groups() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let served = Served::start_with(Config::new(&data)).await;
    let connect = |name: &str, group: &str, usage| {
        let (certificate, key) = certificate(&data, name, &[group], usage);
        let mut config = kube::Config::new(served.url.parse().unwrap());
        config.accept_invalid_certs = true;
        config.auth_info.client_certificate_data = Some(STANDARD.encode(certificate));
        config.auth_info.client_key_data = Some(STANDARD.encode(key).into());
        Client::try_from(config).unwrap()
    };
    let ann = connect("ann", "readers", ExtendedKeyUsagePurpose::ClientAuth);
    let review: SelfSubjectReview = Api::all(ann.clone())
        .create(&PostParams::default(), &SelfSubjectReview::default())
        .await
        .unwrap();
    let user = review.status.unwrap().user_info.unwrap();
    assert_eq!(user.username.as_deref(), Some("ann"));
    assert_eq!(user.groups.unwrap(), ["readers", "system:authenticated"]);
    let maps: Api<ConfigMap> = Api::default_namespaced(ann);
    assert_eq!(code(maps.list(&ListParams::default()).await), 403);

    let root = connect(
        "root",
        "system:masters",
        ExtendedKeyUsagePurpose::ClientAuth,
    );
    Api::<ConfigMap>::default_namespaced(root)
        .list(&ListParams::default())
        .await
        .unwrap();
    // A serving certificate, such as a node has, does not authenticate a user.
    let node = connect(
        "node",
        "system:masters",
        ExtendedKeyUsagePurpose::ServerAuth,
    );
    Api::<ConfigMap>::default_namespaced(node)
        .list(&ListParams::default())
        .await
        .unwrap_err();
    served.end().await;
}
