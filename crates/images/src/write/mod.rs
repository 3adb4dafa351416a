//! Writes OCI images without a container engine: layers from files, configurations, manifests, and archives of OCI layouts.
//!
//! Everything is reproducible: the same files, times and names give the same bytes. Entries are sorted, times and owners are
//! set by the caller, compressed streams carry no time. It does not decide what an image contains.
//!
//! | module | owns |
//! |---|---|
//! | [`Tree`] | the entries of a layer, in memory or on disk; also of other tar archives, such as packages |
//! | [`Layer`] | one compressed layer with its two digests |
//! | [`Archive`] | an OCI layout as a tar archive: one image, for one or several platforms |

mod archive;
mod layer;
mod tar;
mod tree;

use std::io;

pub use archive::{Archive, Image, Process};
pub use layer::{Layer, gzip};
pub use tree::{Content, Naming, Tree};

#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("{0:?} is not a path below the root of an archive")]
    Path(String),
    #[error("{0:?} is already there as another kind of entry")]
    Duplicate(String),
    #[error("{0} is neither a file, a directory nor a link")]
    Unsupported(String),
    #[error("an archive needs at least one image")]
    NoImage,
    #[error("reading {path}")]
    Read {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("writing {path}")]
    Write {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("encoding a document of the image")]
    Encode(#[from] serde_json::Error),
    #[error("{0} seconds since the epoch is no valid time")]
    Time(u64),
}

impl WriteError {
    fn read(path: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Read { path, source }
    }

    fn write(path: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Write { path, source }
    }
}
