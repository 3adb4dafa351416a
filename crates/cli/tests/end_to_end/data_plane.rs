//! The router and the runtime of `up`, as clients of either generation use them.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::support::{Up, stdout_of};

/// The answer to a GET of a sandbox, which `name` names, through the router.
fn get_from_sandbox(up: &Up, name: &str, port: u16, path: &str) -> String {
    let router = up.ready()["router"].as_str().unwrap();
    let mut stream = TcpStream::connect(router.trim_start_matches("http://")).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Sandbox-ID: {name}\r\nX-Sandbox-Port: {port}\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_sandbox_of_the_quickstart_is_reached_by_its_claims_name_on_both_runtime_apis() {
    let up = Up::start(&[]);
    stdout_of(up.command().args(["claim", "mine"]));
    let of_the_claim = stdout_of(up.command().args(["get", "mine", "-o", "json"]));
    let claim: serde_json::Value = serde_json::from_str(&of_the_claim).unwrap();
    let sandbox = claim["status"]["sandbox"]["name"].as_str().unwrap();
    assert_ne!(sandbox, "mine", "it is a warm one");
    for name in ["mine", sandbox] {
        for (port, path) in [(8888, "/"), (8080, "/v1/health")] {
            let answer = get_from_sandbox(&up, name, port, path);
            assert!(
                answer.starts_with("HTTP/1.1 200"),
                "{name} {port}: {answer}"
            );
        }
    }
    let processes = "import socket; socket.create_connection(('127.0.0.1', 9090)); print('open')";
    let answer = stdout_of(
        up.command()
            .args(["exec", "mine", "--", "python3", "-c", processes]),
    );
    assert_eq!(answer, "open\n");
    let unknown = get_from_sandbox(&up, "theirs", 8888, "/");
    assert!(unknown.starts_with("HTTP/1.1 404"), "{unknown}");
}

#[test]
fn up_passes_the_routers_flags_on() {
    let directory = tempfile::tempdir().unwrap();
    let key = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (cert_file, key_file) = (
        directory.path().join("c.pem"),
        directory.path().join("k.pem"),
    );
    std::fs::write(&cert_file, key.cert.pem()).unwrap();
    std::fs::write(&key_file, key.signing_key.serialize_pem()).unwrap();
    let up = Up::start(&[
        "--router-max-request-body-bytes=10",
        "--router-path-routing",
        "--router-https-listen=127.0.0.1:0",
        "--router-tls-cert-file",
        cert_file.to_str().unwrap(),
        "--router-tls-key-file",
        key_file.to_str().unwrap(),
    ]);
    stdout_of(up.command().args(["claim", "mine"]));
    let script = format!(
        "import json, ssl, urllib.request, urllib.error
plain, secure = {:?}, {:?}
context = ssl.create_default_context(cafile={:?})
url = secure.replace('127.0.0.1', 'localhost') + '/sandbox/default/mine/8888/'
print(json.load(urllib.request.urlopen(url, context=context))['status'])
try:
    urllib.request.urlopen(plain + '/sandbox/default/mine/8888/execute', data=b'x' * 11)
except urllib.error.HTTPError as error:
    print(error.code)
",
        up.ready()["router"].as_str().unwrap(),
        up.ready()["routerHttps"].as_str().unwrap(),
        cert_file.to_str().unwrap(),
    );
    let mut python = std::process::Command::new("python3");
    assert_eq!(stdout_of(python.args(["-c", &script])), "ok\n413\n");
}

#[test]
fn up_passes_the_runtimes_flags_on_until_they_are_left_out() {
    let timeout = |up: &Up, claim: &str| {
        stdout_of(up.command().args(["claim", claim]));
        let script = "echo ${SANDBOX_EXEC_TIMEOUT_SECONDS:-unset}";
        stdout_of(up.command().args(["exec", claim, "--", "sh", "-c", script]))
    };
    let mut up = Up::start(&["--runtime-exec-timeout=77"]);
    assert_eq!(timeout(&up, "first"), "77\n");
    // No sandbox of the first start is left for the second one to hand out.
    up.delete_everything();
    up.restart(rustix::process::Signal::TERM);
    assert_eq!(timeout(&up, "second"), "unset\n");
}
