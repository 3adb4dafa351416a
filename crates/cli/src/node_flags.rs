//! The flags that `up` and `node` share: what the node may do, and what pods get from it.

use clap::Args;
use container_runtime::freeze_swap::FreezeSwap;
use pod_network::pod_cidr::PodNetwork;

#[derive(Clone, Debug, Args)]
pub struct NodeFlags {
    /// What pods that no network policy selects may do
    #[arg(long, value_name = "WHAT", default_value = "isolated")]
    unselected_pods: UnselectedPods,

    /// A registry beyond this machine to reach without encryption, as HOST or HOST:PORT; may be repeated
    #[arg(long, value_name = "REGISTRY", value_parser = registry_address)]
    plain_http_registry: Vec<String>,

    /// A registry on this machine, its link or its pods' network that images may be pulled from, as HOST or HOST:PORT; may be
    /// repeated. Those of --plain-http-registry are allowed, too
    #[arg(long, value_name = "REGISTRY", value_parser = registry_address)]
    allow_registry: Vec<String>,

    /// Run an image as another one, whatever its tag: `NAME=IMAGE`, where NAME is a repository or its last part and IMAGE may be
    /// `host`; may be repeated
    #[arg(long, value_name = "NAME=IMAGE", value_parser = image_alias)]
    image_alias: Vec<(String, String)>,

    /// Let pods mount directories of this machine (hostPath); every user who may create pods may then read and write as root
    #[arg(long)]
    allow_host_path: bool,

    /// The IPv4 network that pods get their addresses from, as 10.60.0.0/16 [default: one of 10.200.0.0/16 to 10.214.0.0/16]
    #[arg(long, value_name = "NETWORK")]
    pod_cidr: Option<PodNetwork>,

    /// Compressed memory to page frozen sandboxes out to, as zram:2G; it is swap that the whole machine can use. Without it frozen
    /// sandboxes keep their memory
    #[arg(long, value_name = "zram:SIZE")]
    freeze_swap: Option<FreezeSwap>,
}

impl Default for NodeFlags {
    fn default() -> Self {
        Self {
            unselected_pods: UnselectedPods::Isolated,
            plain_http_registry: Vec::new(),
            allow_registry: Vec::new(),
            image_alias: Vec::new(),
            allow_host_path: false,
            pod_cidr: None,
            freeze_swap: None,
        }
    }
}

impl NodeFlags {
    /// Copies the flags into the configuration of the node.
    pub fn apply(self, config: &mut node::Config) {
        config.unselected_pods = self.unselected_pods.into();
        config.plain_registries = self.plain_http_registry;
        config.allowed_registries = self.allow_registry;
        config.image_aliases = self.image_alias.into_iter().collect();
        config.allow_host_path = self.allow_host_path;
        config.pod_network = self.pod_cidr;
        config.freeze_swap = self.freeze_swap;
    }
}

/// What holds for pods that no network policy selects.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum UnselectedPods {
    /// Reach public addresses; accept no connections
    Isolated,
    /// Reach and be reached, as on a cluster
    Open,
}

impl From<UnselectedPods> for pod_network::policy::Unselected {
    fn from(pods: UnselectedPods) -> Self {
        match pods {
            UnselectedPods::Isolated => Self::Isolated,
            UnselectedPods::Open => Self::Open,
        }
    }
}

/// Reads the address of a registry, as image names spell it.
fn registry_address(text: &str) -> Result<String, String> {
    let fits = |character: char| character.is_ascii_alphanumeric() || ".-:[]".contains(character);
    if text.is_empty() || !text.chars().all(fits) {
        return Err("write it as HOST or HOST:PORT, without a scheme or a path".to_owned());
    }
    Ok(text.to_owned())
}

/// Reads which image is run in place of which.
fn image_alias(text: &str) -> Result<(String, String), String> {
    let (name, image) = text
        .split_once('=')
        .ok_or_else(|| "write it as NAME=IMAGE, as python-runtime=host".to_owned())?;
    let last = name.rsplit('/').next().unwrap_or_default();
    if last.is_empty() || last.contains(':') || name.contains('@') {
        return Err("NAME is a repository, without a tag or a digest".to_owned());
    }
    if image != "host" {
        images::Reference::parse(image).map_err(|error| error.to_string())?;
    }
    Ok((name.to_owned(), image.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_is_read_and_a_bad_one_is_refused() {
        let pair = |name: &str, image: &str| (name.to_owned(), image.to_owned());
        assert_eq!(
            image_alias("registry.example:5000/x/runtime=host"),
            Ok(pair("registry.example:5000/x/runtime", "host"))
        );
        assert_eq!(image_alias("a=b/c:v1"), Ok(pair("a", "b/c:v1")));
        for text in ["a", "=host", "a:v1=host", "a@sha256:0=host", "a=UPPER"] {
            assert!(image_alias(text).is_err(), "{text}");
        }
    }
}
