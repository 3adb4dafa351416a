//! Paging the memory of frozen pods out, by the shim: `process_madvise` has no safe wrapper.

use shim_protocol::{PageOutAnswer, PageOutRequest};

use super::{NativeRuntime, blocking};
use crate::slots::run_shim;

impl NativeRuntime {
    /// Pages the memory of a frozen pod out. A failure costs memory and nothing else, so it is only logged.
    pub(super) async fn page_out_pod(&self, pod: &str) -> Option<String> {
        self.config.freeze_swap?;
        let (groups, containers) = (self.cgroups.clone(), self.groups_of(pod));
        let shim = self.programs.shim.clone();
        let paged_out = blocking(move || {
            let mut processes = Vec::new();
            for (_, group) in &containers {
                groups.allow_swap(&group.parent, &group.name);
                let found = groups.processes(&group.parent, &group.name);
                processes.extend(found.into_iter().map(|pid| pid.as_raw_nonzero().get()));
            }
            run_shim::<PageOutAnswer>(&shim, "page-out", &PageOutRequest { processes })
        });
        match paged_out.await {
            Ok(answer) => Some(saved(&answer)),
            Err(error) => {
                tracing::warn!(pod, error = %api::errors::chain(&error), "cannot page a frozen pod out");
                None
            }
        }
    }
}

/// How much was saved, for users.
fn saved(answer: &PageOutAnswer) -> String {
    let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
    let freed = answer.resident_before.saturating_sub(answer.resident_after);
    format!(
        "{} of {} MiB paged out",
        mebibytes(freed),
        mebibytes(answer.resident_before)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_saved_is_reported_in_mebibytes() {
        let answer = PageOutAnswer {
            resident_before: 65 << 20,
            resident_after: 2 << 20,
        };
        assert_eq!(saved(&answer), "63 of 65 MiB paged out");
    }
}
