//! The examples of the Rust client's documentation, as they stand there, against the real system. Needs root: it starts containers.

#[expect(
    dead_code,
    reason = "its main connects to where users have their system"
)]
#[path = "../../../sdk/examples/blocking.rs"]
mod blocking;
#[expect(
    dead_code,
    reason = "its main connects to where users have their system"
)]
#[path = "../../../sdk/examples/first_sandbox.rs"]
mod first_sandbox;

use crate::streams::client;
use crate::support::{Up, stdout_of};

fn options(up: &Up) -> sdk::Options {
    sdk::Options {
        connection: sdk::Connection::Direct {
            url: up.ready()["router"].as_str().unwrap().to_owned(),
        },
        ..sdk::Options::default()
    }
}

#[test]
fn the_examples_of_the_rust_client_work() {
    let up = Up::start(&[]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let kubernetes = runtime.block_on(async {
        let kubernetes = client(&up).await;
        let client = sdk::Client::new(kubernetes.clone(), options(&up)).unwrap();
        first_sandbox::use_a_sandbox(&client).await.unwrap();
        kubernetes
    });
    let client = sdk::blocking::Client::new(kubernetes, options(&up)).unwrap();
    assert_eq!(blocking::say_hello(&client).unwrap(), "hello\n");
    let claims = stdout_of(up.command().args(["list", "-o", "name"]));
    assert_eq!(claims, "", "the examples end what they began");
}
