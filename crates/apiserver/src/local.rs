//! The in-process client: a `kube::Client` whose requests are function calls instead of network requests.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{FutureExt, future::BoxFuture};
use http::{Request, Response};

use crate::{auth::User, body::Body, http::Frontend, request_info::RequestInfo};

/// A service that answers the requests of one user in process.
#[derive(Clone, Debug)]
pub struct Local {
    frontend: Arc<Frontend>,
    user: Arc<User>,
}

impl Local {
    /// A service that acts as `user`.
    pub fn new(frontend: Arc<Frontend>, user: User) -> Self {
        Self {
            frontend,
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
        let Self { frontend, user } = self.clone();
        async move {
            let info = RequestInfo::of(&request);
            Ok(frontend.handle(&user, info, request, None).await)
        }
        .boxed()
    }
}
