//! Patches: apply a request body that describes a change to an object.
//!
//! A patch that fails does not change the object. This module does not decide which fields may be patched.

pub mod json;
pub mod merge;
pub mod strategic;
