//! The official Python client, unmodified from PyPI, against the server over HTTPS.

use std::{path::Path, process::Command, sync::Arc};

use apiserver::{Config, Server};
use tokio_util::sync::CancellationToken;

fn run(command: &mut Command, what: &str) -> String {
    let output = command.output().unwrap_or_else(|error| {
        panic!("{what}: {error}; this test needs python3 with venv and pip on the PATH")
    });
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{what} failed: {text}");
    text
}

fn exercise(directory: &Path, kubeconfig: &Path) {
    let environment = directory.join("venv");
    run(
        Command::new("python3")
            .args(["-m", "venv"])
            .arg(&environment),
        "making a Python environment",
    );
    let pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "kubernetes",
    ];
    run(
        Command::new(environment.join("bin/python")).args(pip),
        "installing the Python client",
    );
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients_python.py");
    let text = run(
        Command::new(environment.join("bin/python"))
            .arg(script)
            .arg(kubeconfig),
        "the Python client",
    );
    assert!(text.contains("python client ok"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_client_creates_watches_patches_and_discovers() {
    let directory = tempfile::tempdir().unwrap();
    let server = Arc::new(
        Server::open(Config::new(directory.path().join("data")))
            .await
            .unwrap(),
    );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    server
        .write_kubeconfig(
            &kubeconfig,
            &format!("https://{}", listener.local_addr().unwrap()),
        )
        .unwrap();
    let stop = CancellationToken::new();
    let serving = tokio::spawn({
        let (server, stop) = (server.clone(), stop.clone());
        async move { server.serve(listener, stop).await }
    });
    let place = directory.path().to_owned();
    tokio::task::spawn_blocking(move || exercise(&place, &kubeconfig))
        .await
        .unwrap();
    stop.cancel();
    serving.await.unwrap().unwrap();
    Arc::into_inner(server).unwrap().shutdown().await;
}
