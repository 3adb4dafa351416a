//! Which environment variables a claim may set, and in which container.

use api::claim::EnvVar;
use api::template::EnvVarsInjectionPolicy;
use k8s_openapi::api::core::v1::{Container, EnvVar as ContainerEnvVar, PodSpec};

/// Why a claim's variables are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    #[error(
        "spec.env: environment variable injection is not allowed by the template policy \
         (the template's envVarsInjectionPolicy is Disallowed)"
    )]
    Disallowed,
    #[error(
        "spec.env: target container {container:?} not found in template for environment variable {name:?}"
    )]
    UnknownContainer { container: String, name: String },
    #[error("spec.env: the template has no container to set environment variable {name:?} in")]
    NoContainer { name: String },
    #[error(
        "spec.env: environment variable {name:?} is already set in container {container:?}, and the template policy does not \
         allow overrides (the template's envVarsInjectionPolicy is Allowed, not Overrides)"
    )]
    Override { container: String, name: String },
    #[error("spec.env: {name:?} is not a valid name for an environment variable")]
    InvalidName { name: String },
}

/// Sets a claim's variables in the pod, as far as the template's policy lets it.
pub fn inject(
    policy: EnvVarsInjectionPolicy,
    variables: &[EnvVar],
    spec: &mut PodSpec,
) -> Result<(), EnvError> {
    if variables.is_empty() {
        return Ok(());
    }
    if policy == EnvVarsInjectionPolicy::Disallowed {
        return Err(EnvError::Disallowed);
    }
    for variable in variables {
        if !is_valid_name(&variable.name) {
            return Err(EnvError::InvalidName {
                name: variable.name.clone(),
            });
        }
        let container = target(spec, variable)?;
        set(container, variable, policy)?;
    }
    Ok(())
}

fn target<'a>(spec: &'a mut PodSpec, variable: &EnvVar) -> Result<&'a mut Container, EnvError> {
    let named = variable
        .container_name
        .as_deref()
        .filter(|name| !name.is_empty());
    let Some(wanted) = named else {
        return spec
            .containers
            .first_mut()
            .ok_or_else(|| EnvError::NoContainer {
                name: variable.name.clone(),
            });
    };
    spec.init_containers
        .iter_mut()
        .flatten()
        .chain(&mut spec.containers)
        .find(|container| container.name == wanted)
        .ok_or_else(|| EnvError::UnknownContainer {
            container: wanted.to_owned(),
            name: variable.name.clone(),
        })
}

fn set(
    container: &mut Container,
    variable: &EnvVar,
    policy: EnvVarsInjectionPolicy,
) -> Result<(), EnvError> {
    let injected = ContainerEnvVar {
        name: variable.name.clone(),
        value: Some(variable.value.clone()),
        value_from: None,
    };
    let env = container.env.get_or_insert_default();
    match env
        .iter_mut()
        .find(|existing| existing.name == variable.name)
    {
        None => env.push(injected),
        Some(existing) if policy == EnvVarsInjectionPolicy::Overrides => *existing = injected,
        Some(_) => {
            return Err(EnvError::Override {
                container: container.name.clone(),
                name: variable.name.clone(),
            });
        }
    }
    Ok(())
}

/// Kubernetes' rule: printable ASCII without `=`.
fn is_valid_name(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|byte| (byte.is_ascii_graphic() || byte == b' ') && byte != b'=')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variable(name: &str, value: &str, container: Option<&str>) -> EnvVar {
        EnvVar {
            name: name.into(),
            value: value.into(),
            container_name: container.map(Into::into),
        }
    }

    fn container(name: &str) -> Container {
        Container {
            name: name.into(),
            env: Some(vec![ContainerEnvVar {
                name: "MODE".into(),
                value: Some("template".into()),
                value_from: None,
            }]),
            ..Container::default()
        }
    }

    fn pod() -> PodSpec {
        PodSpec {
            containers: vec![container("main"), container("side")],
            init_containers: Some(vec![container("setup")]),
            ..PodSpec::default()
        }
    }

    fn env_of(spec: &PodSpec, name: &str) -> Vec<(String, String)> {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
            .find(|container| container.name == name)
            .and_then(|container| container.env.clone())
            .unwrap_or_default()
            .into_iter()
            .map(|variable| (variable.name, variable.value.unwrap_or_default()))
            .collect()
    }

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    #[test]
    fn variables_go_to_the_first_container_unless_another_is_named() {
        let mut spec = pod();
        let variables = [
            variable("A", "1", None),
            variable("B", "2", Some("side")),
            variable("C", "3", Some("setup")),
            variable("D", "4", Some("")),
        ];
        inject(EnvVarsInjectionPolicy::Allowed, &variables, &mut spec).unwrap();
        let mode = pair("MODE", "template");
        assert_eq!(
            env_of(&spec, "main"),
            [mode.clone(), pair("A", "1"), pair("D", "4")]
        );
        assert_eq!(env_of(&spec, "side"), [mode.clone(), pair("B", "2")]);
        assert_eq!(env_of(&spec, "setup"), [mode, pair("C", "3")]);
    }

    #[test]
    fn overrides_replace_in_place() {
        let mut spec = pod();
        inject(
            EnvVarsInjectionPolicy::Overrides,
            &[variable("MODE", "claim", None)],
            &mut spec,
        )
        .unwrap();
        assert_eq!(env_of(&spec, "main"), [pair("MODE", "claim")]);
        assert_eq!(env_of(&spec, "side"), [pair("MODE", "template")]);
    }

    #[test]
    fn refusals_name_the_variable_and_the_container() {
        use EnvVarsInjectionPolicy::{Allowed, Disallowed, Overrides};
        let table = [
            (
                Disallowed,
                variable("A", "1", None),
                vec!["not allowed by the template policy"],
            ),
            (
                Allowed,
                variable("MODE", "1", None),
                vec!["\"MODE\"", "\"main\""],
            ),
            (
                Allowed,
                variable("A", "1", Some("nope")),
                vec!["\"A\"", "target container \"nope\" not found"],
            ),
            (Overrides, variable("A=B", "1", None), vec!["\"A=B\""]),
        ];
        for (policy, variable, expected) in table {
            let message = inject(policy, &[variable], &mut pod())
                .unwrap_err()
                .to_string();
            assert!(message.starts_with("spec.env"), "{message}");
            for part in expected {
                assert!(message.contains(part), "{message}");
            }
        }
    }

    #[test]
    fn no_variables_are_fine_under_any_policy() {
        let mut spec = pod();
        inject(EnvVarsInjectionPolicy::Disallowed, &[], &mut spec).unwrap();
        assert_eq!(spec, pod());
    }
}
