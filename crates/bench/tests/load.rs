//! A load on the whole system, with pods that run. Needs root, because it starts containers, and `agent-sandbox` beside
//! `agent-sandbox-bench`, which `cargo test --workspace` builds.

use std::process::{Command, Stdio};

#[test]
fn a_load_on_the_whole_system_is_judged_and_leaves_nothing_running() {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test starts containers: run it as root"
    );
    let home = tempfile::tempdir().unwrap();
    let results = home.path().join("results");
    let output = Command::new(env!("CARGO_BIN_EXE_agent-sandbox-bench"))
        .env("AGENT_SANDBOX_HOME", home.path())
        .env_remove("KUBECONFIG")
        .stdin(Stdio::null())
        .args(["load", "rapid-burst", "--target=up"])
        .args(["--rounds=2", "--claims=4", "--pool=6", "--pause=0"])
        .arg("--output")
        .arg(&results)
        .output()
        .unwrap();
    let (printed, complaints) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    );
    assert!(
        printed.contains("8 claims in 2 rounds"),
        "{printed}{complaints}"
    );
    // Latency depends on the machine, so the test does not judge it.
    let judged = complaints.lines().all(|line| line.starts_with("missed: "));
    assert!(judged, "{complaints}");
    assert_eq!(output.status.success(), complaints.is_empty());
    for file in ["report.html", "results.json", "junit.xml"] {
        let text = std::fs::read_to_string(results.join(file)).unwrap();
        assert!(text.contains("rapid-burst"), "{file}: {text}");
    }
    let report = std::fs::read_to_string(results.join("report.html")).unwrap();
    assert_eq!(report.matches("<svg").count(), 3, "a plot is missing");
}
