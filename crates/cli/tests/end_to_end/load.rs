//! A load on the whole system, with pods that run. Needs root: it starts containers.

use crate::support::{agent_sandbox, require_root, run};

#[test]
fn a_load_on_the_whole_system_is_judged_and_leaves_nothing_running() {
    require_root();
    let home = tempfile::tempdir().unwrap();
    let results = home.path().join("results");
    // Its sandboxes go at once when they are deleted, so that the node still clears them away when it is told to stop.
    let output = run(agent_sandbox(home.path())
        .args(["bench", "load", "rapid-burst", "--target=up"])
        .args(["--rounds=2", "--claims=4", "--pool=6", "--pause=0"])
        .arg("--output")
        .arg(&results));
    let (said, complained) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    );
    assert!(said.contains("8 claims in 2 rounds"), "{said}{complained}");
    // How fast it was is no test's to say.
    let judged = complained.lines().all(|line| line.starts_with("missed: "));
    assert!(judged, "{complained}");
    assert_eq!(output.status.success(), complained.is_empty());
    for file in ["report.html", "results.json", "junit.xml"] {
        let text = std::fs::read_to_string(results.join(file)).unwrap();
        assert!(text.contains("rapid-burst"), "{file}: {text}");
    }
    let report = std::fs::read_to_string(results.join("report.html")).unwrap();
    assert_eq!(report.matches("<svg").count(), 3, "a plot is missing");
}
