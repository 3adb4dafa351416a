//! The handler that a pod's RuntimeClass names.

use container_runtime::handlers::{Driver, Handlers, NATIVE, Unusable};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::{Api, Client};

#[derive(Debug, thiserror::Error)]
pub enum HandlerError {
    #[error(
        "runtime class {0:?} does not exist; leave out runtimeClassName for the built-in isolation"
    )]
    NoClass(String),
    #[error(
        "runtime class {class:?} has handler {handler:?}, which this node does not know; it knows {NATIVE}, runc and runsc"
    )]
    Unknown { class: String, handler: String },
    #[error("runtime class {class:?} needs {program}, which does not work on this node: {why}")]
    Broken {
        class: String,
        program: &'static str,
        why: String,
    },
    #[error("reading runtime class {class:?}")]
    Read {
        class: String,
        #[source]
        source: kube::Error,
    },
}

/// The driver for a pod of this class; `None` for the native runtime.
pub async fn resolve(
    handlers: &Handlers,
    client: &Client,
    class: Option<&str>,
) -> Result<Option<Driver>, HandlerError> {
    let Some(class) = class.filter(|class| !class.is_empty()) else {
        return Ok(None);
    };
    let classes = Api::<RuntimeClass>::all(client.clone());
    let found = classes
        .get_opt(class)
        .await
        .map_err(|source| HandlerError::Read {
            class: class.to_owned(),
            source,
        })?;
    let handler = found
        .ok_or_else(|| HandlerError::NoClass(class.to_owned()))?
        .handler;
    handlers
        .driver(&handler)
        .await
        .map_err(|problem| match problem {
            Unusable::Unknown => HandlerError::Unknown {
                class: class.to_owned(),
                handler,
            },
            Unusable::Broken { program, why } => HandlerError::Broken {
                class: class.to_owned(),
                program,
                why,
            },
        })
}
