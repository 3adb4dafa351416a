//! Which parts of the system `up` runs. The API server always runs: the other parts communicate through it.

use clap::{Args, ValueEnum};

/// A part that can be left out. The names are those of `--disable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Part {
    /// Reconcile sandboxes, claims, templates and warm pools
    Controllers,
    /// Run pods on this machine; without it there is no scheduler and no volume provisioner either
    Node,
    /// Bind pods to this machine's node
    Scheduler,
    /// Provision directories of this machine for PersistentVolumeClaims
    VolumeProvisioner,
    /// Write EndpointSlices for services
    Endpoints,
    /// Forward requests to sandboxes
    Router,
}

/// Which controllers run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Controllers {
    #[default]
    All,
    /// None, so that another controller can work on this API alone
    None,
}

#[derive(Clone, Debug, Default, Args)]
pub struct PartFlags {
    /// Which of the controllers of sandboxes to run; `none` leaves the kinds to another controller, and is short for
    /// --disable=controllers
    #[arg(long, value_enum, value_name = "WHICH", default_value = "all")]
    pub controllers: Controllers,

    /// Parts not to run, separated by commas. Without the controllers or the node, the quickstart's template and warm pool are
    /// not created
    #[arg(long, value_enum, value_name = "PARTS", value_delimiter = ',')]
    pub disable: Vec<Part>,
}

impl PartFlags {
    pub fn runs(&self, part: Part) -> bool {
        let is_disabled = |part| self.disable.contains(&part);
        match part {
            Part::Controllers => {
                self.controllers == Controllers::All && !is_disabled(Part::Controllers)
            }
            // Both work for this machine's node alone.
            Part::Scheduler | Part::VolumeProvisioner => {
                !is_disabled(part) && !is_disabled(Part::Node)
            }
            Part::Node | Part::Endpoints | Part::Router => !is_disabled(part),
        }
    }

    /// The names of the parts that do not run.
    pub fn disabled(&self) -> Vec<String> {
        let parts = Part::value_variants().iter();
        let disabled = parts.filter(|part| !self.runs(**part));
        disabled
            .filter_map(|part| Some(part.to_possible_value()?.get_name().to_owned()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        parts: PartFlags,
    }

    fn disabled(arguments: &[&str]) -> Result<Vec<String>, String> {
        let arguments = ["up"].iter().chain(arguments);
        Command::try_parse_from(arguments)
            .map(|command| command.parts.disabled())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn what_does_not_run_is_named() {
        for (arguments, expected) in [
            (&[][..], &[][..]),
            (&["--controllers=all"], &[]),
            (&["--controllers=none"], &["controllers"]),
            (
                &["--disable=router,controllers"],
                &["controllers", "router"],
            ),
            (
                &["--controllers=none", "--disable=controllers"],
                &["controllers"],
            ),
            (
                &["--disable=node", "--disable=endpoints"],
                &["node", "scheduler", "volume-provisioner", "endpoints"],
            ),
            (&["--disable=scheduler"], &["scheduler"]),
        ] {
            assert_eq!(disabled(arguments).unwrap(), expected, "{arguments:?}");
        }
    }

    #[test]
    fn an_unknown_part_is_refused_with_the_list_of_parts() {
        let error = disabled(&["--disable=node,kubelet"]).unwrap_err();
        assert!(error.contains("invalid value 'kubelet'"), "{error}");
        let names = "controllers, node, scheduler, volume-provisioner, endpoints, router";
        assert!(error.contains(names), "{error}");
        let error = disabled(&["--controllers=sandbox"]).unwrap_err();
        assert!(error.contains("possible values: all, none"), "{error}");
    }
}
