//! The in-process client: a `kube::Client` whose requests are function calls.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{FutureExt, future::BoxFuture};
use http::{Request, Response};

use crate::{auth::User, http::body::Body, operations::Api};

/// Answers the requests of one user in process.
#[derive(Clone, Debug)]
pub struct Local {
    api: Arc<Api>,
    user: Arc<User>,
}

impl Local {
    /// A service that acts as `user`.
    pub fn new(api: Arc<Api>, user: User) -> Self {
        Self {
            api,
            user: Arc::new(user),
        }
    }
}

impl tower::Service<Request<kube::client::Body>> for Local {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<kube::client::Body>) -> Self::Future {
        let Self { api, user } = self.clone();
        async move { Ok(crate::http::handle(&api, &user, request).await) }.boxed()
    }
}
