//! The words the node and the shim share: the requests the node writes to a launcher's standard input, the answers it
//! reads back, and the frames spoken on a container agent's socket.
//!
//! Only types and their encoding live here. How a container is made is the shim's business, and why it is made is the
//! node's; this crate exists so that neither links the other.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod frame;
mod launch;

pub use frame::{
    AttachRequest, ExecRequest, ExitReport, FailureReport, Frame, FrameError, FrameKind,
    HEADER_BYTES, MAXIMUM_PAYLOAD_BYTES, SignalRequest, StartedReport, WindowSize, decode, encode,
};
pub use launch::{
    BindSource, ContainerExit, ContainerFiles, Entrance, IdentityRange, Launch, LaunchAnswer,
    Layer, Mount, MountKind, NamespacePins, NamespacesAnswer, NamespacesRequest, Outside,
    Preparation, Process, ResourceLimit, RootFilesystem, User,
};
