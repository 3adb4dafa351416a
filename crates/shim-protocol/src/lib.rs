//! The protocol between the node and the shim: the requests that the node writes to a launcher's standard input, the responses,
//! and the frames on the socket of a container agent.
//!
//! This crate has only types and their encoding, so that the node and the shim need not link each other. The shim knows how to
//! create a container, and the node knows why.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod frame;
mod launch;
mod page_out;

pub use frame::{
    AttachRequest, ExecRequest, ExitReport, FailureReport, Frame, FrameError, FrameKind,
    HEADER_BYTES, MAXIMUM_PAYLOAD_BYTES, SignalRequest, StartedReport, WindowSize, decode, encode,
};
pub use launch::{
    BindSource, ContainerExit, ContainerFiles, Entrance, Launch, LaunchAnswer, Layer, Mount,
    MountKind, NamespacePins, NamespacesAnswer, NamespacesRequest, Outside, Preparation, Process,
    ResourceLimit, RootFilesystem, UidRange, User,
};
pub use page_out::{PageOutAnswer, PageOutRequest};

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
