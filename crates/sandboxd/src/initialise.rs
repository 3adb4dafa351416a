//! The initialisation port (49983): the controller that assigns the sandbox sets environment variables for later commands here.
//!
//! `POST /init` is idempotent per token: the same token may be sent again, and sets the same variables again. After the first
//! token, another one is refused, so that no other client re-initialises a sandbox that is in use. The token protects
//! nothing else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use serde::Deserialize;

use crate::exec_http::read_json;
use crate::http_server::Handler;
use crate::response::{Body, Refusal, empty, message};
use crate::session::SharedEnvironment;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Initialisation {
    #[serde(default)]
    env_vars: Option<BTreeMap<String, String>>,
    #[serde(default)]
    access_token: Option<String>,
}

#[derive(Debug)]
pub struct Initialiser {
    environment: SharedEnvironment,
    token: Mutex<Option<String>>,
}

impl Initialiser {
    pub fn new(environment: SharedEnvironment) -> Self {
        Self {
            environment,
            token: Mutex::default(),
        }
    }

    fn initialise(&self, request: Initialisation) -> Result<(), Refusal> {
        let variables = request.env_vars.unwrap_or_default();
        if let Some(name) = variables
            .iter()
            .find_map(|(name, value)| invalid_variable(name, value))
        {
            return Err(Refusal::bad_request(format!(
                "the environment variable {name:?} is not valid"
            )));
        }
        let mut token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        let offered = request.access_token.filter(|token| !token.is_empty());
        if token.is_some() && *token != offered {
            return Err(Refusal::new(
                StatusCode::UNAUTHORIZED,
                "the sandbox was initialised with another token",
            ));
        }
        *token = offered;
        self.environment
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(variables);
        Ok(())
    }
}

/// The name, if the pair is not a valid environment variable.
fn invalid_variable<'a>(name: &'a str, value: &str) -> Option<&'a str> {
    (name.is_empty() || name.contains(['=', '\0']) || value.contains('\0')).then_some(name)
}

impl Handler for Initialiser {
    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        match (request.method(), request.uri().path()) {
            (&Method::GET | &Method::HEAD, "/health") => empty(StatusCode::NO_CONTENT),
            (&Method::POST, "/init") => {
                let initialised = read_json(request.into_body())
                    .await
                    .and_then(|body| self.initialise(body));
                initialised.map_or_else(Refusal::into_response, |()| empty(StatusCode::NO_CONTENT))
            }
            (_, "/health" | "/init") => {
                message(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
            }
            _ => message(StatusCode::NOT_FOUND, "Not Found"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(token: Option<&str>, variables: &[(&str, &str)]) -> Initialisation {
        let pairs = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Initialisation {
            env_vars: Some(pairs.collect()),
            access_token: token.map(str::to_owned),
        }
    }

    #[test]
    fn the_same_token_is_accepted_again_and_another_is_refused() {
        let initialiser = Initialiser::new(SharedEnvironment::default());
        initialiser
            .initialise(request(None, &[("A", "0")]))
            .unwrap();
        initialiser
            .initialise(request(Some("one"), &[("A", "1")]))
            .unwrap();
        initialiser
            .initialise(request(Some("one"), &[("A", "1")]))
            .unwrap();
        for other in [Some("two"), None, Some("")] {
            let refusal = initialiser
                .initialise(request(other, &[("A", "2")]))
                .unwrap_err();
            assert_eq!(refusal.status, StatusCode::UNAUTHORIZED);
        }
        assert_eq!(initialiser.environment.lock().unwrap()["A"], "1");
    }

    #[test]
    fn invalid_environment_variables_are_refused() {
        let initialiser = Initialiser::new(SharedEnvironment::default());
        for (name, value) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0")] {
            assert!(
                initialiser
                    .initialise(request(None, &[(name, value)]))
                    .is_err()
            );
        }
        assert!(initialiser.environment.lock().unwrap().is_empty());
    }
}
