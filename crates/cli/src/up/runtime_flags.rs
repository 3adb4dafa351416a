//! The flags of `up` for the runtime inside the quickstart's sandboxes: `--runtime-exec-timeout` is `sandboxd --exec-timeout`, and so on.
//!
//! They become environment variables of the quickstart's templates, by server-side apply under a field manager of their own. So a flag
//! that is left out at the next start takes its variable away again, and no other field of a template changes.

use api::SandboxTemplate;
use clap::Args;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use crate::logging;

/// Owns the variables in the templates.
const FIELD_MANAGER: &str = "agent-sandbox-up-runtime-flags";

/// Flags that change how the runtime of the quickstart's sandboxes works. Sandboxes that run already, those of the warm pool included, keep theirs.
#[derive(Clone, Debug, Default, Args)]
#[group(skip)]
#[expect(
    clippy::struct_field_names,
    reason = "clap names each flag after its field"
)]
pub struct RuntimeFlags {
    /// Time limit of a command in the quickstart's sandboxes whose request names none [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = checked("SANDBOX_EXEC_TIMEOUT_SECONDS"))]
    runtime_exec_timeout: Option<String>,

    /// How many bytes of each output stream of a command the quickstart's sandboxes return [default: 16777216]
    #[arg(long, value_name = "BYTES", value_parser = checked("SANDBOX_MAX_OUTPUT_BYTES"))]
    runtime_max_output_bytes: Option<String>,

    /// How long running commands get in the quickstart's sandboxes before they are killed on SIGTERM [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = checked("SANDBOX_SHUTDOWN_GRACE_SECONDS"))]
    runtime_shutdown_grace: Option<String>,

    /// Log format of the runtime in the quickstart's sandboxes: text or json [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = checked("SANDBOX_LOG_FORMAT"))]
    runtime_log_format: Option<String>,
}

/// Parses a value as the runtime will.
fn checked(variable: &'static str) -> impl Fn(&str) -> Result<String, String> + Clone {
    move |value| {
        sandboxd::Config::from_environment(|name| (name == variable).then(|| value.to_owned()))
            .map(|_| value.to_owned())
            .map_err(|error| error.to_string())
    }
}

impl RuntimeFlags {
    /// The environment variables that the runtime reads.
    fn variables(&self) -> Vec<(&'static str, &str)> {
        let variables = [
            ("SANDBOX_EXEC_TIMEOUT_SECONDS", &self.runtime_exec_timeout),
            ("SANDBOX_MAX_OUTPUT_BYTES", &self.runtime_max_output_bytes),
            (
                "SANDBOX_SHUTDOWN_GRACE_SECONDS",
                &self.runtime_shutdown_grace,
            ),
            ("SANDBOX_LOG_FORMAT", &self.runtime_log_format),
        ];
        variables
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.as_deref()?)))
            .collect()
    }

    /// Writes the variables into a template, unless it has them already or does not need them.
    pub async fn apply(
        &self,
        client: &Client,
        namespace: &str,
        name: &str,
        container: &str,
    ) -> anyhow::Result<()> {
        let templates: Api<SandboxTemplate> = Api::namespaced(client.clone(), namespace);
        let Some(template) = templates.get_opt(name).await? else {
            return Ok(());
        };
        let is_managed = template
            .managed_fields()
            .iter()
            .any(|entry| entry.manager.as_deref() == Some(FIELD_MANAGER));
        let variables = self.variables();
        if variables.is_empty() && !is_managed {
            return Ok(());
        }
        let containers = &template.spec.pod_template.spec.containers;
        if !containers.iter().any(|found| found.name == container) {
            logging::notice(&format!(
                "warning: --runtime flags do not apply to the template {name}: it has no container {container}"
            ));
            return Ok(());
        }
        let patch = Patch::Apply(configuration(name, container, &variables));
        templates
            .patch(name, &PatchParams::apply(FIELD_MANAGER).force(), &patch)
            .await?;
        Ok(())
    }
}

/// The fields of a template that the flags own.
fn configuration(name: &str, container: &str, variables: &[(&str, &str)]) -> Value {
    let mut template = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": name},
    });
    if !variables.is_empty() {
        let variables: Vec<_> = variables
            .iter()
            .map(|(name, value)| json!({"name": name, "value": value}))
            .collect();
        template["spec"]["podTemplate"]["spec"]["containers"] =
            json!([{"name": container, "env": variables}]);
    }
    template
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flags: RuntimeFlags,
    }

    #[test]
    fn a_flag_becomes_the_variable_that_the_runtime_reads() {
        let words = [
            "up",
            "--runtime-exec-timeout=7.5",
            "--runtime-max-output-bytes=10",
            "--runtime-shutdown-grace=3",
            "--runtime-log-format=json",
        ];
        let flags = Line::try_parse_from(words).unwrap().flags;
        let variables = flags.variables();
        let variable = |wanted: &str| {
            let found = variables.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| (*value).to_owned())
        };
        let config = sandboxd::Config::from_environment(variable).unwrap();
        assert_eq!(config.exec_timeout.as_millis(), 7500);
        assert_eq!(config.max_output_bytes, 10);
        assert_eq!(config.shutdown_grace.as_secs(), 3);
        assert_eq!(config.log_format, sandboxd::LogFormat::Json);
        assert!(RuntimeFlags::default().variables().is_empty());
    }

    #[test]
    fn a_value_that_the_runtime_would_refuse_is_a_usage_error() {
        for word in [
            "--runtime-exec-timeout=-1",
            "--runtime-max-output-bytes=many",
            "--runtime-shutdown-grace=soon",
            "--runtime-log-format=xml",
        ] {
            let error = Line::try_parse_from(["up", word]).unwrap_err().to_string();
            let (flag, _) = word.split_once('=').unwrap();
            assert!(error.contains(flag), "{error}");
        }
    }
}
