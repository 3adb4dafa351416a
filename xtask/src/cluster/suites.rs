//! The suites of `cargo xtask test-cluster`, in the order in which they run: each leaves the cluster as it found it, and those that break
//! parts of it come last.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::go_programs::{self, Module};
use crate::test_clients;

pub struct Suite {
    pub name: &'static str,
    program: Program,
}

enum Program {
    /// A script of `tests/cluster`, with the package that pip installs for it.
    Script { package: Option<&'static str> },
    /// A script of `tests/kubernetes`, for which the cluster has a kubelet.
    EndToEnd,
    /// A script of `tests/clients`, run by `tests/cluster/client.py` with the pool and the router that it expects.
    Client {
        file: &'static str,
        package: Option<&'static str>,
    },
    /// The tests of a Go module.
    GoTests { module: Module },
}

const fn script(name: &'static str) -> Suite {
    Suite {
        name,
        program: Program::Script { package: None },
    }
}

const fn end_to_end(name: &'static str) -> Suite {
    Suite {
        name,
        program: Program::EndToEnd,
    }
}

const fn client(name: &'static str, file: &'static str, package: Option<&'static str>) -> Suite {
    Suite {
        name,
        program: Program::Client { file, package },
    }
}

const fn go_tests(name: &'static str, module: Module) -> Suite {
    Suite {
        name,
        program: Program::GoTests { module },
    }
}

pub const SUITES: [Suite; 17] = [
    script("install"),
    end_to_end("sandboxes"),
    end_to_end("scenarios"),
    client("sdk_0_4_6", "sdk_0_4_6", Some("k8s-agent-sandbox==0.4.6")),
    client(
        "sdk_1_0_8",
        "sdk_1_0_8",
        Some("k8s-agent-sandbox[async]==1.0.8"),
    ),
    go_tests("go_sdk", Module::Sdk),
    go_tests("go_sdk_v1beta1", Module::SdkV1beta1),
    script("policies"),
    script("gvisor"),
    script("volumes"),
    script("autoscaling"),
    script("second_node"),
    script("breakdown"),
    script("many_claims"),
    script("uninstall"),
    end_to_end("upgrade"),
    script("versus"),
];

/// A suite with what it runs installed.
#[derive(Serialize, Deserialize)]
pub struct Prepared {
    pub name: String,
    pub command: Vec<String>,
    pub environment: BTreeMap<String, String>,
}

impl Prepared {
    pub fn new(name: &str, command: Vec<String>) -> Self {
        Self {
            name: name.to_owned(),
            command,
            environment: BTreeMap::new(),
        }
    }
}

impl Suite {
    /// Installs or builds what the suite runs: the cluster's namespaces have no network for it.
    pub fn prepare(&self, root: &Path) -> anyhow::Result<Prepared> {
        let text = |path: &Path| path.display().to_string();
        let python = |package, file: &str| -> anyhow::Result<Vec<String>> {
            let python = test_clients::python_for(package)?;
            Ok(vec![text(&python), text(&root.join(file))])
        };
        let name = self.name;
        let mut prepared = Prepared::new(name, Vec::new());
        match self.program {
            Program::Script { package } => {
                prepared.command = python(package, &format!("tests/cluster/{name}.py"))?;
            }
            Program::EndToEnd => {
                prepared.command = python(None, &format!("tests/kubernetes/{name}.py"))?;
            }
            Program::Client { file, package } => {
                prepared.command = python(package, "tests/cluster/client.py")?;
                prepared.command.push(file.to_owned());
            }
            Program::GoTests { module } => {
                let cache = test_clients::cache_directory()?;
                prepared.command = python(None, "tests/cluster/client.py")?;
                prepared
                    .command
                    .push(text(&go_programs::tests(root, module, &cache)?));
            }
        }
        Ok(prepared)
    }
}
