//! Patches: how a request body that describes a change becomes the changed object.
//!
//! A patch that fails leaves the object as it was. What may be patched is decided elsewhere.

pub mod json;
pub mod merge;
pub mod strategic;
