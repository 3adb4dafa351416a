//! The decisions of the controllers, apart from everything they touch.
//!
//! A function here is given what was observed and what time it is, and answers with what to do about it. It is pure and total:
//! no client, clock, randomness or log. Each kind has a module of its own; what two kinds decide alike is shared.
//!
//! | module | owns |
//! |---|---|
//! | [`expiry`] | when something expires |
//! | [`ownership`] | who controls an object, and references to a controller |
//! | [`patch`] | JSON merge patches that carry only what changes |
//! | [`sandbox`] | what a Sandbox needs: pod, volumes, service, status |

pub mod expiry;
pub mod ownership;
pub mod patch;
pub mod sandbox;
