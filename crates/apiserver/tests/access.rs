//! Authentication, authorization, audit, and the kubelet proxy.

mod support;

use std::sync::Arc;

use apiserver::{Config, Server, User};
use base64::{Engine, engine::general_purpose::STANDARD};
use futures::StreamExt;
use k8s_openapi::api::{
    authentication::v1::SelfSubjectReview,
    authorization::v1::SelfSubjectAccessReview,
    core::v1::{ConfigMap, Node, Pod, Secret, ServiceAccount},
    rbac::v1::{ClusterRoleBinding, Role, RoleBinding},
};
use kube::{
    Api, Client,
    api::{ListParams, LogParams, Patch, PatchParams, PostParams, WatchParams},
};
use rcgen::ExtendedKeyUsagePurpose;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde_json::{Value, json};
use support::{code, server};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_util::sync::CancellationToken;

fn parsed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the object is well formed")
}

fn ann() -> User {
    User {
        name: "ann".into(),
        groups: vec!["system:authenticated".into()],
        ..User::default()
    }
}

async fn grant(client: &Client, rules: Value) {
    let role: Role = parsed(json!({"metadata": {"name": "granted"}, "rules": rules}));
    Api::<Role>::default_namespaced(client.clone())
        .create(&PostParams::default(), &role)
        .await
        .expect("cannot create the role");
    let binding: RoleBinding = parsed(
        json!({"metadata": {"name": "granted"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "granted"},
        "subjects": [{"kind": "User", "name": "ann"}, {"kind": "ServiceAccount", "name": "default", "namespace": "default"}]}),
    );
    Api::<RoleBinding>::default_namespaced(client.clone())
        .create(&PostParams::default(), &binding)
        .await
        .expect("cannot create the binding");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_has_only_the_permissions_of_their_roles() {
    let server = server().await;
    let user = server.client_as(ann());
    let maps: Api<ConfigMap> = Api::default_namespaced(user.clone());
    let kube::Error::Api(refused) = maps.list(&ListParams::default()).await.unwrap_err() else {
        panic!()
    };
    assert_eq!((refused.code, refused.reason.as_str()), (403, "Forbidden"));
    assert!(refused.message.contains("User \"ann\" cannot list resource \"configmaps\" in API group \"\" in the namespace \"default\""), "{}", refused.message);

    grant(
        &server.client(),
        json!([{"verbs": ["get", "list"], "apiGroups": [""], "resources": ["configmaps"]}]),
    )
    .await;
    maps.list(&ListParams::default()).await.unwrap();
    assert_eq!(
        code(
            Api::<ConfigMap>::namespaced(user.clone(), "kube-system")
                .list(&ListParams::default())
                .await
        ),
        403
    );
    assert_eq!(
        code(
            Api::<Secret>::default_namespaced(user.clone())
                .list(&ListParams::default())
                .await
        ),
        403
    );

    let ask = |verb: &str| -> SelfSubjectAccessReview {
        parsed(
            json!({"metadata": {}, "spec": {"resourceAttributes": {"verb": verb, "resource": "configmaps", "namespace": "default"}}}),
        )
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(user);
    assert!(
        reviews
            .create(&PostParams::default(), &ask("list"))
            .await
            .unwrap()
            .status
            .unwrap()
            .allowed
    );
    assert!(
        !reviews
            .create(&PostParams::default(), &ask("delete"))
            .await
            .unwrap()
            .status
            .unwrap()
            .allowed
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_cannot_grant_permissions_they_do_not_have() {
    let server = server().await;
    grant(&server.client(), json!([
        {"verbs": ["*"], "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"]},
        {"verbs": ["get"], "apiGroups": [""], "resources": ["configmaps"]},
    ])).await;
    // `*` would include `escalate` and `bind`, so grant exactly the write verbs.
    let roles: Api<Role> = Api::default_namespaced(server.client());
    let verbs = json!({"rules": [
        {"verbs": ["create", "patch", "get"], "apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"]},
        {"verbs": ["get"], "apiGroups": [""], "resources": ["configmaps"]},
    ]});
    roles
        .patch("granted", &PatchParams::default(), &Patch::Merge(verbs))
        .await
        .unwrap();
    let mine: Api<Role> = Api::default_namespaced(server.client_as(ann()));
    let role = |resource: &str| -> Role {
        parsed(
            json!({"metadata": {"name": format!("to-{resource}")}, "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": [resource]}]}),
        )
    };
    mine.create(&PostParams::default(), &role("configmaps"))
        .await
        .unwrap();
    let kube::Error::Api(refused) = mine
        .create(&PostParams::default(), &role("secrets"))
        .await
        .unwrap_err()
    else {
        panic!()
    };
    assert!(
        refused.message.contains("not currently held"),
        "{}",
        refused.message
    );
    let bindings: Api<RoleBinding> = Api::default_namespaced(server.client_as(ann()));
    let binding: RoleBinding = parsed(
        json!({"metadata": {"name": "up"}, "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "User", "name": "ann"}]}),
    );
    assert_eq!(
        code(bindings.create(&PostParams::default(), &binding).await),
        403
    );
    let everywhere: Api<ClusterRoleBinding> = Api::all(server.client_as(ann()));
    assert_eq!(code(everywhere.list(&ListParams::default()).await), 403);
    server.shutdown().await;
}

/// A server over HTTPS, and a way to connect with any token.
struct Served {
    server: Arc<Server>,
    url: String,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Served {
    async fn start() -> Self {
        Self::start_with(Config::in_memory()).await
    }

    async fn start_with(config: Config) -> Self {
        let server = Arc::new(Server::open(config).await.expect("cannot open the server"));
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("cannot bind a port");
        let url = format!(
            "https://{}",
            listener.local_addr().expect("no local address")
        );
        let stop = CancellationToken::new();
        let task = tokio::spawn({
            let (server, stop) = (server.clone(), stop.clone());
            async move { server.serve(listener, stop).await.expect("serving failed") }
        });
        Self {
            server,
            url,
            stop,
            task,
        }
    }

    fn connect(&self, token: &str) -> Client {
        self.connect_as(token, None)
    }

    fn connect_as(&self, token: &str, user: Option<&str>) -> Client {
        let mut config = kube::Config::new(self.url.parse().expect("invalid URL"));
        config.accept_invalid_certs = true;
        config.auth_info.token = Some(token.to_owned().into());
        config.auth_info.impersonate = user.map(ToOwned::to_owned);
        Client::try_from(config).expect("cannot create the client")
    }

    async fn end(self) {
        self.stop.cancel();
        self.task.await.expect("serving panicked");
        Arc::into_inner(self.server)
            .expect("the server is still shared")
            .shutdown()
            .await;
    }
}

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

/// A root store with one certificate authority.
fn roots(authority_pem: &[u8]) -> rustls::RootCertStore {
    let authority = CertificateDer::from_pem_slice(authority_pem).expect("a certificate");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority).expect("added");
    roots
}

/// A kubelet endpoint that answers logs, and echoes every upgraded connection.
async fn kubelet(server: &Server) -> u16 {
    let made = server
        .issue_node_certificate("node-1", &["127.0.0.1".to_owned()])
        .expect("a certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients = rustls::server::WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots(made.authority_pem.as_bytes())),
        provider.clone(),
    )
    .build()
    .expect("a verifier");
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_client_cert_verifier(clients)
        .with_single_cert(
            vec![
                CertificateDer::from_pem_slice(made.certificate_pem.as_bytes())
                    .expect("a certificate"),
            ],
            PrivateKeyDer::from_pem_slice(made.key_pem.as_bytes()).expect("a key"),
        )
        .expect("a server");
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(acceptor.clone(), stream));
        }
    });
    port
}

async fn answer(acceptor: tokio_rustls::TlsAcceptor, stream: TcpStream) {
    let Ok(mut stream) = acceptor.accept(stream).await else {
        return;
    };
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await.expect("a request"));
    }
    let request = String::from_utf8(request).expect("text").to_lowercase();
    if request.contains("authorization") {
        stream
            .write_all(b"HTTP/1.1 500 Leak\r\ncontent-length: 0\r\n\r\n")
            .await
            .expect("written");
    } else if request.starts_with("get /containerlogs/default/p/main") {
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
            .await
            .expect("written");
    } else {
        stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: SPDY/3.1\r\n\r\n").await.expect("written");
        let (mut reader, mut writer) = tokio::io::split(stream);
        let _ = tokio::io::copy(&mut reader, &mut writer).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_and_upgrades_reach_the_node_without_the_clients_credentials() {
    let served = Served::start().await;
    let admin = served.server.client();
    let kubeconfig = tempfile::NamedTempFile::new().unwrap();
    served
        .server
        .write_kubeconfig(kubeconfig.path(), &served.url)
        .unwrap();
    let text = std::fs::read_to_string(kubeconfig.path()).unwrap();
    let config: Value = serde_yaml_ng::from_str(&text).unwrap();
    let token = config["users"][0]["user"]["token"]
        .as_str()
        .unwrap()
        .to_owned();
    let authority = config["clusters"][0]["cluster"]["certificate-authority-data"].as_str();
    let authority = STANDARD.decode(authority.unwrap()).unwrap();

    let pods: Api<Pod> = Api::default_namespaced(served.connect(&token));
    let pod = parsed(
        json!({"metadata": {"name": "p"}, "spec": {"nodeName": "node-1", "containers": [{"name": "main", "image": "host"}]}}),
    );
    pods.create(&PostParams::default(), &pod).await.unwrap();
    assert_eq!(
        code(pods.logs("p", &LogParams::default()).await),
        404,
        "the node does not exist"
    );
    let nodes: Api<Node> = Api::all(admin.clone());
    nodes
        .create(
            &PostParams::default(),
            &parsed(json!({"metadata": {"name": "node-1"}})),
        )
        .await
        .unwrap();
    let port = kubelet(&served.server).await;
    let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}], "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}});
    nodes
        .patch_status("node-1", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    assert_eq!(
        pods.logs("p", &LogParams::default()).await.unwrap(),
        "hello"
    );

    let mut stream = upgraded(&served, &authority, &token).await;
    stream.write_all(b"ping").await.unwrap();
    let mut echoed = [0; 4];
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"ping");
    drop((stream, nodes, pods, admin));
    served.end().await;
}

/// Opens a port-forward in the way of kubectl.
async fn upgraded(
    served: &Served,
    authority_pem: &[u8],
    token: &str,
) -> impl AsyncReadExt + AsyncWriteExt + Unpin {
    let address = served.url.trim_start_matches("https://").to_owned();
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(
        rustls::crypto::ring::default_provider(),
    ))
    .with_safe_default_protocol_versions()
    .expect("versions")
    .with_root_certificates(roots(authority_pem))
    .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = TcpStream::connect(&address).await.expect("connected");
    let name = rustls::pki_types::ServerName::try_from("localhost").expect("a name");
    let mut stream = connector.connect(name, stream).await.expect("encrypted");
    let request = format!(
        "POST /api/v1/namespaces/default/pods/p/portforward HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nconnection: Upgrade\r\nupgrade: SPDY/3.1\r\ncontent-length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.expect("written");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("no response"));
    }
    let head = String::from_utf8(head).expect("text");
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    stream
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

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_audited_without_their_bodies() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.log");
    let mut config = Config::new(directory.path().join("data"));
    config.audit = Some(apiserver::audit::Options {
        path: path.clone(),
        max_bytes: 1 << 20,
        max_backups: 1,
    });
    let served = Served::start_with(config).await;
    let token = std::fs::read_to_string(directory.path().join("data/pki/admin.token")).unwrap();
    let admin = served.connect(token.trim());
    let map = serde_json::from_value(
        json!({"metadata": {"name": "one"}, "data": {"password": "hidden"}}),
    )
    .unwrap();
    Api::<ConfigMap>::default_namespaced(admin.clone())
        .create(&PostParams::default(), &map)
        .await
        .unwrap();
    let as_ann: Api<ConfigMap> =
        Api::default_namespaced(served.connect_as(token.trim(), Some("ann")));
    assert_eq!(code(as_ann.get("one").await), 403);
    let unauthenticated: Api<ConfigMap> = Api::default_namespaced(served.connect("wrong"));
    assert_eq!(code(unauthenticated.get("one").await), 401);
    let watch = WatchParams::default().timeout(1);
    let events = Api::<ConfigMap>::default_namespaced(admin)
        .watch(&watch, "0")
        .await
        .unwrap();
    events.for_each(|_| futures::future::ready(())).await;

    let lines = testkit::eventually("the audit log is complete", || async {
        let text = std::fs::read_to_string(&path).ok()?;
        let lines: Vec<Value> = text
            .lines()
            .map_while(|line| serde_json::from_str(line).ok())
            .collect();
        let ended = |line: &Value| {
            line["verb"] == "watch"
                && line["stage"] == "ResponseComplete"
                && line["objectRef"]["resource"] == "configmaps"
        };
        lines.iter().any(ended).then_some(lines)
    })
    .await;
    let find = |verb: &str, code: u16| {
        let wanted = |line: &&Value| {
            line["verb"] == verb
                && line["responseStatus"]["code"] == code
                && line["objectRef"]["resource"] == "configmaps"
        };
        lines
            .iter()
            .find(wanted)
            .unwrap_or_else(|| panic!("no {verb} with {code}: {lines:#?}"))
    };
    let created = find("create", 201);
    assert_eq!(
        (&created["level"], &created["stage"]),
        (&json!("Metadata"), &json!("ResponseComplete"))
    );
    assert_eq!(created["user"]["username"], "system:admin");
    assert_eq!(created["sourceIPs"], json!(["127.0.0.1"]));
    assert_eq!(
        created["objectRef"],
        json!({"resource": "configmaps", "namespace": "default", "apiVersion": "v1"})
    );
    let refused = find("get", 403);
    assert_eq!(refused["impersonatedUser"]["username"], "ann");
    assert_eq!(
        refused["annotations"]["authorization.k8s.io/decision"],
        "forbid"
    );
    assert_eq!(find("get", 401)["user"], json!({}));
    assert!(!std::fs::read_to_string(&path).unwrap().contains("hidden"));
    served.end().await;
}
