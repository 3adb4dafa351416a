//! Combines an image with a container's specification: layers, command, environment, working directory, user. Pure, except that it
//! reads the image's `/etc/passwd` and `/etc/group`.

use std::path::{Path, PathBuf};

use images::{Accounts, ContainerConfig, Image, Reference, UserError};
use shim_protocol::{Mount, User};

use super::launching::view;
use crate::host_image::{self, HostImage};
use crate::privileges::Privileges;
use crate::{ContainerSpec, ImageSource};

/// The `PATH` of an image that sets none.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The environment variable with sandboxd's base directory.
const BASE_DIRECTORY: &str = "SANDBOX_BASE_DIR";

/// Why an image and a container's specification cannot be combined.
#[derive(Debug, thiserror::Error)]
pub enum ImageRootError {
    #[error("an empty directory")]
    EmptyDirectory(#[source] std::io::Error),
    #[error(transparent)]
    User(#[from] UserError),
    #[error("neither the container nor its image names a command")]
    NoCommand,
    #[error("container has runAsNonRoot and image will run as root")]
    RunsAsRoot,
    #[error(
        "the image's user {uid}:{gid} does not fit the 16 bits of container UIDs and GIDs; set runAsUser and runAsGroup"
    )]
    UserOutOfRange { uid: u32, gid: u32 },
    #[error(
        "this node runs without root, so a container has user and group 0, which stand for the user that runs the node; leave out runAsUser, runAsGroup, runAsNonRoot, fsGroup and supplementalGroups"
    )]
    Rootless,
}

/// The combination of an image and a container's specification.
#[derive(Debug)]
pub struct ImageRoot {
    /// Uppermost first.
    pub layers: Vec<PathBuf>,
    pub mounts: Vec<Mount>,
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub working_directory: String,
    pub user: User,
    pub id: String,
}

/// For the built-in image `host`. A container without a command runs sandboxd.
pub fn of_host(host: &HostImage, spec: &ContainerSpec) -> Result<ImageRoot, ImageRootError> {
    let arguments = if spec.command.is_empty() && spec.arguments.is_empty() {
        vec![host_image::SANDBOXD_PATH.to_owned()]
    } else {
        spec.command
            .iter()
            .chain(&spec.arguments)
            .cloned()
            .collect()
    };
    let user = User {
        uid: spec.user.unwrap_or(0),
        gid: spec.group.unwrap_or(0),
        groups: spec.supplementary_groups.clone(),
    };
    Ok(ImageRoot {
        layers: vec![host.layer.clone()],
        mounts: host.mounts.clone(),
        arguments,
        environment: host.environment.clone(),
        working_directory: spec
            .working_directory
            .clone()
            .unwrap_or_else(|| host.working_directory.clone()),
        user: checked(user, spec, Privileges::current())?,
        id: format!("host@sha256:{}", host.id),
    })
}

/// For a container without an image: an empty directory and no command.
pub fn of_nothing(data_dir: &Path, spec: &ContainerSpec) -> Result<ImageRoot, ImageRootError> {
    let layer = data_dir.join("images").join("nothing");
    std::fs::create_dir_all(&layer).map_err(ImageRootError::EmptyDirectory)?;
    Ok(ImageRoot {
        layers: vec![layer],
        mounts: Vec::new(),
        arguments: Vec::new(),
        environment: Vec::new(),
        working_directory: "/".to_owned(),
        user: User {
            uid: spec.user.unwrap_or(0),
            gid: spec.group.unwrap_or(0),
            groups: Vec::new(),
        },
        id: String::new(),
    })
}

/// For an image of the store. sandboxd is mounted into it if the command is sandboxd.
pub fn of_image(
    image: &Image,
    name: &Reference,
    sandboxd: &Path,
    spec: &ContainerSpec,
) -> Result<ImageRoot, ImageRootError> {
    let config = image.configuration.config.clone().unwrap_or_default();
    let arguments = arguments(&config, spec)?;
    let account = Accounts::of(&image.layers);
    let wanted = match spec.user {
        Some(uid) => uid.to_string(),
        None => config.user.clone().unwrap_or_default(),
    };
    let found = account.resolve(&wanted)?;
    let mut groups = spec.supplementary_groups.clone();
    groups.extend(found.groups);
    let user = User {
        uid: found.uid,
        gid: spec.group.unwrap_or(found.gid),
        groups,
    };
    let mut environment = environment(&config, found.home);
    let working_directory = spec
        .working_directory
        .clone()
        .or(config.working_dir)
        .filter(|directory| !directory.is_empty())
        .unwrap_or_else(|| "/".to_owned());
    let mut mounts = Vec::new();
    if asks_for_sandboxd(&arguments) {
        mounts.push(view(sandboxd, Path::new(host_image::SANDBOXD_PATH)));
        extend_path(&mut environment);
        // Unless the image sets it, sandboxd's base directory is the working directory.
        if !environment.iter().any(|(key, _)| key == BASE_DIRECTORY) {
            environment.push((BASE_DIRECTORY.to_owned(), working_directory.clone()));
        }
    }
    Ok(ImageRoot {
        layers: image.layers.clone(),
        mounts,
        arguments,
        environment,
        working_directory,
        user: checked(user, spec, Privileges::current())?,
        id: ImageSource::id(image, name),
    })
}

/// The command line. `command` replaces the image's entry point and its arguments; `args` alone replaces only the arguments.
fn arguments(
    config: &ContainerConfig,
    spec: &ContainerSpec,
) -> Result<Vec<String>, ImageRootError> {
    let words = |words: &Option<Vec<String>>| words.clone().unwrap_or_default();
    let (command, arguments) = if spec.command.is_empty() {
        let arguments = if spec.arguments.is_empty() {
            words(&config.cmd)
        } else {
            spec.arguments.clone()
        };
        (words(&config.entrypoint), arguments)
    } else {
        (spec.command.clone(), spec.arguments.clone())
    };
    let all: Vec<String> = command.into_iter().chain(arguments).collect();
    if all.is_empty() {
        return Err(ImageRootError::NoCommand);
    }
    Ok(all)
}

fn environment(config: &ContainerConfig, home: Option<String>) -> Vec<(String, String)> {
    let mut environment = vec![
        ("PATH".to_owned(), DEFAULT_PATH.to_owned()),
        ("HOME".to_owned(), home.unwrap_or_else(|| "/".to_owned())),
    ];
    for (key, value) in config
        .env
        .iter()
        .flatten()
        .filter_map(|pair| pair.split_once('='))
    {
        environment.retain(|(existing, _)| existing != key);
        environment.push((key.to_owned(), value.to_owned()));
    }
    environment
}

fn asks_for_sandboxd(arguments: &[String]) -> bool {
    let first = arguments.first().map(String::as_str);
    first == Some(host_image::SANDBOXD_PATH) || first == Some("sandboxd")
}

fn extend_path(environment: &mut [(String, String)]) {
    let directory = Path::new(host_image::SANDBOXD_PATH)
        .parent()
        .unwrap_or(Path::new("/"))
        .display()
        .to_string();
    for (_, path) in environment.iter_mut().filter(|(key, _)| key == "PATH") {
        path.push(':');
        path.push_str(&directory);
    }
}

fn checked(
    user: User,
    spec: &ContainerSpec,
    privileges: Privileges,
) -> Result<User, ImageRootError> {
    const UIDS: u32 = 1 << 16;
    if privileges == Privileges::Rootless {
        return rootless_user(spec);
    }
    if spec.must_not_be_root && user.uid == 0 {
        return Err(ImageRootError::RunsAsRoot);
    }
    if user.uid >= UIDS || user.gid >= UIDS {
        return Err(ImageRootError::UserOutOfRange {
            uid: user.uid,
            gid: user.gid,
        });
    }
    Ok(user)
}

/// The user of a container on a rootless node, which has only UID 0. The user that an image sets is ignored: UID 0 is an
/// unprivileged user of the machine anyway. A user that the pod sets is refused, because the pod may depend on the number.
fn rootless_user(spec: &ContainerSpec) -> Result<User, ImageRootError> {
    let other = [spec.user, spec.group]
        .into_iter()
        .flatten()
        .any(|id| id != 0);
    if other || spec.must_not_be_root || !spec.supplementary_groups.is_empty() {
        return Err(ImageRootError::Rootless);
    }
    Ok(User {
        uid: 0,
        gid: 0,
        groups: Vec::new(),
    })
}
