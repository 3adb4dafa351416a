//! Interning of pod specs: sandboxes with equal specs share one copy.
//!
//! The table holds weak references, so it does not keep a spec alive.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};
use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use k8s_openapi::api::core::v1::PodSpec;

/// The number of dropped specs in the table before they are removed.
const CLEAR_AFTER: usize = 64;

/// The specs that are alive, by the hash of their JSON. Of two different specs with the same hash only the first is shared.
#[derive(Debug, Default)]
pub struct PodSpecs(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    specs: HashMap<u64, Weak<PodSpec>>,
    /// The number of specs that were alive when dropped ones were last removed.
    held: usize,
}

impl PodSpecs {
    /// Replaces a spec by an equal one that is alive, or remembers it.
    pub fn share(&self, spec: &mut Arc<PodSpec>) {
        let Some(hash) = hash(spec) else { return };
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match table.specs.get(&hash).and_then(Weak::upgrade) {
            Some(held) if held == *spec => *spec = held,
            Some(_) => {}
            None => table.insert(hash, spec),
        }
    }
}

impl Table {
    fn insert(&mut self, hash: u64, spec: &Arc<PodSpec>) {
        self.specs.insert(hash, Arc::downgrade(spec));
        if self.specs.len() > 2 * self.held + CLEAR_AFTER {
            self.specs.retain(|_, spec| spec.strong_count() > 0);
            self.held = self.specs.len();
        }
    }
}

fn hash(spec: &PodSpec) -> Option<u64> {
    struct Into(DefaultHasher);
    impl io::Write for Into {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.write(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut hasher = Into(DefaultHasher::new());
    serde_json::to_writer(&mut hasher, spec).ok()?;
    Some(hasher.0.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(node: usize) -> Arc<PodSpec> {
        Arc::new(PodSpec {
            node_name: Some(node.to_string()),
            ..PodSpec::default()
        })
    }

    #[test]
    fn equal_specs_share_one_copy() {
        let specs = PodSpecs::default();
        let (mut first, mut second, mut other) = (spec(1), spec(1), spec(2));
        for one in [&mut first, &mut second, &mut other] {
            specs.share(one);
        }
        assert!(Arc::ptr_eq(&first, &second));
        assert_eq!(other, spec(2));
    }

    #[test]
    fn dropped_specs_are_forgotten() {
        let specs = PodSpecs::default();
        let mut held = spec(0);
        specs.share(&mut held);
        for node in 1..10_000 {
            specs.share(&mut spec(node));
        }
        let known = specs.0.lock().unwrap().specs.len();
        assert!(known <= 2 * CLEAR_AFTER, "{known} specs are known");
        let mut again = spec(0);
        specs.share(&mut again);
        assert!(Arc::ptr_eq(&held, &again));
    }
}
