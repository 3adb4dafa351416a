//! Table tests of how requests name sandboxes, including hostile requests.

use http::HeaderValue;
use proptest::prelude::*;

use super::*;

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(
            HeaderName::from_bytes(name.as_bytes()).unwrap(),
            HeaderValue::from_bytes(value.as_bytes()).unwrap(),
        );
    }
    headers
}

fn identify_with(
    path: &str,
    pairs: &[(&str, &str)],
    domains: &[&str],
    path_routing: bool,
) -> Result<Option<Target>, Failure> {
    let config = Config {
        host_domains: domains.iter().map(|domain| (*domain).to_owned()).collect(),
        path_prefix: path_routing.then(|| "/sandbox".to_owned()),
        ..Config::default()
    };
    identify(&config, &path.parse().unwrap(), &headers(pairs))
}

fn named(pairs: &[(&str, &str)]) -> Result<(String, u16), Failure> {
    identify_with("/x", pairs, &[], false).map(|target| {
        let target = target.expect("a sandbox is named");
        (target.sandbox.as_str().to_owned(), target.port)
    })
}

#[test]
fn headers_name_a_sandbox_with_defaults() {
    assert_eq!(
        named(&[("x-sandbox-id", "abc")]),
        Ok(("default/abc".into(), 8888))
    );
    assert_eq!(
        named(&[
            ("x-sandbox-id", "abc"),
            ("x-sandbox-namespace", "team-1"),
            ("x-sandbox-port", "3000")
        ]),
        Ok(("team-1/abc".into(), 3000))
    );
    assert_eq!(
        named(&[("e2b-sandbox-id", "ns--abc"), ("e2b-sandbox-port", "49983")]),
        Ok(("ns/abc".into(), 49983))
    );
    assert_eq!(identify_with("/x", &[], &[], false), Ok(None));
    assert_eq!(
        identify_with("/x", &[("x-sandbox-id", "")], &[], false),
        Ok(None)
    );
}

#[test]
fn invalid_values_are_named() {
    let wrong_names = [
        "a.b",
        "a/b",
        "../x",
        "A",
        "-a",
        "a-",
        "a b",
        "a%2fb",
        "a\u{e9}",
        &"a".repeat(254),
    ];
    for name in wrong_names {
        assert_eq!(
            named(&[("x-sandbox-id", name)]),
            Err(Failure::InvalidSandbox),
            "{name}"
        );
    }
    for namespace in [
        "",
        "a.b",
        "a/b",
        "UP",
        "a_b",
        "kube-system.svc",
        &"a".repeat(64),
    ] {
        let result = named(&[("x-sandbox-id", "a"), ("x-sandbox-namespace", namespace)]);
        assert_eq!(result, Err(Failure::InvalidNamespace), "{namespace}");
    }
    for port in [
        "",
        "0",
        "65536",
        "-1",
        "+80",
        "80x",
        "8 0",
        "99999999999999999999",
        "０",
    ] {
        let result = named(&[("x-sandbox-id", "a"), ("x-sandbox-port", port)]);
        assert_eq!(result, Err(Failure::InvalidPort), "{port}");
    }
    let twice = named(&[("x-sandbox-id", "a"), ("x-sandbox-id", "b")]);
    assert_eq!(twice, Err(Failure::Repeated("X-Sandbox-ID")));
}

#[test]
fn addresses_that_no_sandbox_can_have_are_refused() {
    for address in [
        "169.254.169.254",
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "localhost",
        "10.0.0.1:80",
        "10.0.0",
        "x",
        "0x7f.1",
        "2130706433",
    ] {
        let result = named(&[("x-sandbox-id", "a"), ("x-sandbox-pod-ip", address)]);
        assert_eq!(result, Err(Failure::InvalidAddress), "{address}");
    }
    for address in ["10.1.2.3", "192.168.1.1", "fd00::5", "2001:db8::1", ""] {
        assert!(
            named(&[("x-sandbox-id", "a"), ("x-sandbox-pod-ip", address)]).is_ok(),
            "{address}"
        );
    }
}

#[test]
fn timeouts_are_seconds_and_invalid_values_are_ignored() {
    let timeout = |text: &str| {
        let pairs = [("x-sandbox-id", "a"), ("x-sandbox-timeout", text)];
        identify_with("/", &pairs, &[], false)
            .unwrap()
            .unwrap()
            .timeout
    };
    assert_eq!(timeout("60"), Some(Duration::from_secs(60)));
    assert_eq!(timeout("0.5"), Some(Duration::from_millis(500)));
    for nonsense in ["0", "-1", "inf", "nan", "soon", ""] {
        assert_eq!(timeout(nonsense), None, "{nonsense}");
    }
}

#[test]
fn hosts_below_a_routed_domain_name_a_sandbox() {
    let by = |host: &str, pairs: &[(&str, &str)]| {
        let mut all = vec![("host", host)];
        all.extend_from_slice(pairs);
        identify_with("/", &all, &["sandbox.example"], false)
            .map(|target| target.map(|target| (target.sandbox.as_str().to_owned(), target.port)))
    };
    let found = |key: &str, port| Ok(Some((key.to_owned(), port)));
    assert_eq!(
        by("3000-abc.sandbox.example", &[]),
        found("default/abc", 3000)
    );
    assert_eq!(
        by("3000-team--abc-1.Sandbox.Example:8443", &[]),
        found("team/abc-1", 3000)
    );
    // A page cannot choose its host, but it can choose headers: the host takes precedence.
    assert_eq!(
        by("3000-abc.sandbox.example", &[("x-sandbox-id", "victim")]),
        found("default/abc", 3000)
    );
    assert_eq!(
        by("other.example", &[("x-sandbox-id", "abc")]),
        found("default/abc", 8888)
    );
    assert_eq!(by("sandbox.example", &[]), Ok(None));
    assert_eq!(by("0-abc.sandbox.example", &[]), Err(Failure::InvalidPort));
    assert_eq!(by("abc.sandbox.example", &[]), Err(Failure::InvalidSandbox));
    assert_eq!(
        by("3000-a.b.sandbox.example", &[]),
        Err(Failure::InvalidSandbox)
    );
    assert_eq!(by("notsandbox.example", &[]), Ok(None));
}

#[test]
fn paths_name_a_sandbox_only_with_path_routing() {
    let target = identify_with("/sandbox/team/abc/3000/a/b?q", &[], &[], true)
        .unwrap()
        .unwrap();
    assert_eq!((target.sandbox.as_str(), target.port), ("team/abc", 3000));
    assert_eq!(
        &"/sandbox/team/abc/3000/a/b"[target.consumed_path..],
        "/a/b"
    );
    let bare = identify_with("/sandbox/team/abc/3000", &[], &[], true)
        .unwrap()
        .unwrap();
    assert_eq!(&"/sandbox/team/abc/3000"[bare.consumed_path..], "");
    assert_eq!(
        identify_with("/sandbox/team/abc/3000/", &[], &[], false),
        Ok(None)
    );
    assert_eq!(
        identify_with("/sandbox/team/abc", &[], &[], true),
        Err(Failure::InvalidPort)
    );
    assert_eq!(
        identify_with("/sandbox/../abc/1/", &[], &[], true),
        Err(Failure::InvalidNamespace)
    );
}

#[test]
fn a_local_router_accepts_only_host_names_that_cannot_be_registered() {
    let local = Config {
        host_domains: vec!["box.example".to_owned()],
        own_names: OwnNames::Local,
        path_prefix: Some("/sandbox".to_owned()),
        ..Config::default()
    };
    let any = Config {
        own_names: OwnNames::Any,
        ..local.clone()
    };
    for (host, is_local) in [
        ("127.0.0.1:8080", true),
        ("192.168.1.7", true),
        ("[::1]:8080", true),
        ("[fd00::7]", true),
        ("localhost:8080", true),
        ("LOCALHOST", true),
        ("my.localhost.", true),
        ("sandbox-router-svc:8080", true),
        ("sandbox-router-svc.default.svc", true),
        ("sandbox-router-svc.default.svc.cluster.local:8080", true),
        ("box.example:8080", true),
        ("evil.example:8080", false),
        ("evil.example.", false),
        ("localhost.evil.example", false),
        ("127.0.0.1.evil.example", false),
        ("svc.cluster.local.evil.example", false),
        ("cluster.local", false),
        ("sandbox-router-svc.com", false),
    ] {
        for (path, named) in [
            ("/execute", &[("host", host), ("x-sandbox-id", "abc")][..]),
            ("/sandbox/default/abc/8888/execute", &[("host", host)]),
        ] {
            let (uri, headers) = (path.parse().unwrap(), headers(named));
            let found = identify(&local, &uri, &headers);
            if is_local {
                assert_eq!(found.unwrap().unwrap().sandbox.name(), "abc", "{host}");
            } else {
                assert_eq!(found, Err(Failure::Misdirected), "{host}");
            }
            assert!(identify(&any, &uri, &headers).is_ok(), "{host}");
        }
    }
    let by_host = headers(&[("host", "3000-abc.box.example")]);
    let found = identify(&local, &Uri::from_static("/"), &by_host);
    assert_eq!(found.unwrap().unwrap().port, 3000);
}

#[test]
fn a_request_names_one_host_without_user_information() {
    let any = Config::default();
    for (uri, hosts, is_fine) in [
        ("/", &["localhost:8080"][..], true),
        ("/", &["[::1]:8080"], true),
        ("/", &["[fd00::7]"], true),
        ("/", &["a_b.example."], true),
        ("http://localhost:8080/", &["LOCALHOST:8080"], true),
        ("http://localhost:8080/", &[], true),
        ("/", &[], true),
        ("/", &["x", "x"], false),
        ("http://x/", &["y"], false),
        ("http://x/", &["x:80"], false),
        ("/", &["localhost@evil"], false),
        ("/", &["localhost@evil.example"], false),
        ("/", &["evil.example@localhost"], false),
        ("http://evil.example@localhost/", &[], false),
        ("http://evil.example@localhost/", &["localhost"], false),
        ("/", &["a b"], false),
        ("/", &["localhost/evil"], false),
        ("/", &["localhost:evil"], false),
        ("/", &["localhost:1:2"], false),
        ("/", &["[::1"], false),
        ("/", &["[::1]x"], false),
        ("/", &["[evil]"], false),
        ("/", &["h\u{e4}"], false),
        ("/", &[""], false),
    ] {
        let hosts: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
        let found = identify(&any, &uri.parse().unwrap(), &headers(&hosts));
        assert_eq!(found.is_ok(), is_fine, "{uri} {hosts:?}: {found:?}");
    }
}

proptest! {
    #[test]
    fn headers_name_only_valid_labels(id in "[ -~]{0,40}", namespace in "[ -~]{0,40}", port in "[ -~]{0,8}") {
        let pairs = [("x-sandbox-id", id.as_str()), ("x-sandbox-namespace", &namespace), ("x-sandbox-port", &port)];
        if let Ok(Some(target)) = identify_with("/", &pairs, &[], false) {
            prop_assert!(is_label(target.sandbox.name(), 253));
            prop_assert!(is_label(target.sandbox.namespace(), 63));
            prop_assert_eq!(target.port.to_string(), port.trim_start_matches('0'));
        }
    }

    #[test]
    fn no_host_panics(host in "\\PC{0,60}") {
        if let Ok(value) = HeaderValue::from_bytes(host.as_bytes()) {
            let mut map = HeaderMap::new();
            map.insert(header::HOST, value);
            let host_domains = vec!["sandbox.example".to_owned()];
            let config = Config { host_domains, own_names: OwnNames::Local, path_prefix: Some("/sandbox".to_owned()), ..Config::default() };
            let _ = identify(&config, &Uri::from_static("/"), &map);
        }
    }
}
