//! `agent-sandbox image`: the images a node has, on this machine.
//!
//! It works on the data directory, beside a running node: the image store is locked by both, and records the images that pods use.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use images::{Credential, Image, Images, Reference, Settings, Summary};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::data_directory;
use crate::output::Table;

#[derive(Debug, Subcommand)]
pub enum Command {
    Pull(PullArguments),
    Load(LoadArguments),
    #[command(visible_alias = "ls")]
    List(ListArguments),
    #[command(visible_alias = "remove")]
    Rm(RemoveArguments),
}

#[derive(Debug, Args)]
struct StoreArguments {
    /// The data directory of `up` [default: as `up` has it]
    #[arg(long, value_name = "DIRECTORY")]
    data_dir: Option<PathBuf>,
}

/// Pull an image from a registry
#[derive(Debug, Args)]
pub struct PullArguments {
    #[command(flatten)]
    store: StoreArguments,

    /// The image, by tag or digest
    image: String,

    /// Who to be at the registry; the password is read from standard input
    #[arg(long, value_name = "NAME")]
    username: Option<String>,

    /// Reach the registry without encryption even though it is not on this machine
    #[arg(long)]
    plain_http: bool,
}

/// Load the images of an OCI layout or of an archive made by `docker save`
#[derive(Debug, Args)]
pub struct LoadArguments {
    #[command(flatten)]
    store: StoreArguments,

    /// A directory or an archive, compressed or not
    path: PathBuf,

    /// What to call the image, in place of what the files say
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    #[default]
    Table,
    Json,
    Yaml,
    Name,
}

/// List images, with their size and whether a pod uses them
#[derive(Debug, Args)]
pub struct ListArguments {
    #[command(flatten)]
    store: StoreArguments,

    /// How to print them
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

/// Remove images that no pod uses
#[derive(Debug, Args)]
pub struct RemoveArguments {
    #[command(flatten)]
    store: StoreArguments,

    /// Names, or the first digits of an image's identity
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
}

pub async fn execute(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Pull(arguments) => pull(arguments).await?,
        Command::Load(arguments) => load(arguments).await?,
        Command::List(arguments) => list(&arguments)?,
        Command::Rm(arguments) => return remove(arguments).await,
    }
    Ok(ExitCode::SUCCESS)
}

impl StoreArguments {
    fn open(&self, plain_registries: Vec<String>) -> anyhow::Result<Images> {
        let data = match &self.data_dir {
            Some(directory) => directory.clone(),
            None => data_directory::default_path()?,
        };
        data_directory::create(&data)?;
        let node = data.join("node");
        // A node refuses a data directory that other users may enter, so that this must not make it with the usual mode.
        if !node.exists() {
            data_directory::create(&node)?;
        }
        let directory = node::config::image_directory(&node);
        let settings = Settings {
            plain_registries,
            ..Settings::new(&directory)
        };
        Images::open(settings)
            .with_context(|| format!("cannot open the images in {}", directory.display()))
    }
}

async fn pull(arguments: PullArguments) -> anyhow::Result<()> {
    let name = Reference::parse(&arguments.image)?;
    let plain = if arguments.plain_http {
        vec![name.registry().to_owned()]
    } else {
        Vec::new()
    };
    let credentials = match arguments.username {
        None => Vec::new(),
        Some(user) => {
            let mut password = String::new();
            std::io::stdin()
                .read_to_string(&mut password)
                .context("cannot read the password from standard input")?;
            vec![Credential::Password {
                user,
                password: password.trim_end_matches(['\r', '\n']).to_owned(),
            }]
        }
    };
    let images = arguments.store.open(plain)?;
    let image = images
        .pull(&name, credentials)
        .await
        .map_err(anyhow::Error::new)
        .with_context(|| format!("cannot pull {name}"))?;
    announce(&name, &image);
    Ok(())
}

async fn load(arguments: LoadArguments) -> anyhow::Result<()> {
    let name = arguments
        .name
        .as_deref()
        .map(Reference::parse)
        .transpose()?;
    let images = arguments.store.open(Vec::new())?;
    let loaded = match images.load(&arguments.path, name).await {
        Err(images::LoadError::Nameless) => {
            bail!(
                "{} does not say what its image is called; give it a name with --name",
                shown(&arguments.path)
            )
        }
        other => other.with_context(|| format!("cannot load {}", shown(&arguments.path)))?,
    };
    for (names, image) in loaded {
        for name in names {
            announce(&name, &image);
        }
    }
    Ok(())
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn announce(name: &Reference, image: &Image) {
    println!("{name}\t{}", image.id);
}

fn list(arguments: &ListArguments) -> anyhow::Result<()> {
    let images = arguments.store.open(Vec::new())?.list()?;
    match arguments.output {
        Format::Table => print!("{}", table(&images, Timestamp::now()).render()),
        Format::Json => println!("{}", serde_json::to_string_pretty(&images)?),
        Format::Yaml => print!("{}", serde_yaml_ng::to_string(&images)?),
        Format::Name => images
            .iter()
            .for_each(|image| println!("{}", main_name(image))),
    }
    Ok(())
}

fn main_name(image: &Summary) -> String {
    image
        .names
        .first()
        .cloned()
        .unwrap_or_else(|| image.id.to_string())
}

fn table(images: &[Summary], now: Timestamp) -> Table {
    const SHORT: usize = 12;
    let mut table = Table::new(&["NAME", "ID", "SIZE", "AGE", "USED BY"]);
    for image in images {
        let used_by = match image.used_by.len() {
            0 => "-".to_owned(),
            1 => "1 container".to_owned(),
            count => format!("{count} containers"),
        };
        for name in image
            .names
            .iter()
            .cloned()
            .chain(image.names.is_empty().then(|| "<none>".to_owned()))
        {
            table.row(vec![
                name,
                image.id.hex()[..SHORT].to_owned(),
                size(image.bytes),
                age(now.duration_since(image.added_at)),
                used_by.clone(),
            ]);
        }
    }
    table
}

fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    let mut whole = bytes;
    let mut tenths = 0;
    let mut unit = "B";
    for next in UNITS {
        if whole < 1024 {
            break;
        }
        tenths = whole % 1024 * 10 / 1024;
        whole /= 1024;
        unit = next;
    }
    if unit == "B" {
        format!("{whole} {unit}")
    } else {
        format!("{whole}.{tenths} {unit}")
    }
}

fn age(duration: SignedDuration) -> String {
    let seconds = duration.as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// Removes the images that it can, and prints why others stay.
async fn remove(arguments: RemoveArguments) -> anyhow::Result<ExitCode> {
    let images = arguments.store.open(Vec::new())?;
    let removal = move || {
        let mut code = ExitCode::SUCCESS;
        for name in &arguments.images {
            match images.remove(name) {
                Ok(removed) => removed
                    .images
                    .iter()
                    .for_each(|image| println!("{image} removed")),
                Err(error) => {
                    eprintln!(
                        "error: {}",
                        crate::output::chain(&anyhow::Error::new(error))
                    );
                    code = ExitCode::FAILURE;
                }
            }
        }
        code
    };
    Ok(tokio::task::spawn_blocking(removal).await?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn images_of_a_node_that_has_not_started_are_in_a_private_directory() {
        let data = tempfile::tempdir().unwrap();
        let arguments = StoreArguments {
            data_dir: Some(data.path().to_owned()),
        };
        arguments.open(Vec::new()).unwrap();
        let node = data.path().join("node");
        let mode = node.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        // As a node does when it starts.
        data_directory::create(&node).unwrap();
    }

    #[test]
    fn sizes_are_shown_in_the_unit_that_fits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (5 << 30, "5.0 GiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}
