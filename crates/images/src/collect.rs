//! Garbage collection: chooses the images to remove when disk space is short. Pure.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

use crate::digest::Digest;
use crate::store::Summary;

/// When garbage collection starts and stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// If more bytes than this are in use, images are removed …
    pub high_bytes: u64,
    /// … until at most this many are in use.
    pub low_bytes: u64,
    /// Images used more recently than this are not removed: a container may be about to start from one.
    pub minimum_age: SignedDuration,
}

/// Chooses the images to remove, given how many bytes are in use: the least recently used first, and never one in use. A layer
/// frees space only when the last image that contains it is removed.
pub fn choose(
    images: &[Summary],
    used_bytes: u64,
    thresholds: Thresholds,
    now: Timestamp,
) -> BTreeSet<Digest> {
    let mut chosen = BTreeSet::new();
    if used_bytes <= thresholds.high_bytes {
        return chosen;
    }
    let mut holders: BTreeMap<&Digest, usize> = BTreeMap::new();
    for (layer, _) in images.iter().flat_map(|image| &image.layers) {
        *holders.entry(layer).or_default() += 1;
    }
    let mut candidates: Vec<&Summary> = images
        .iter()
        .filter(|image| image.used_by.is_empty())
        .filter(|image| now.duration_since(image.last_used) >= thresholds.minimum_age)
        .collect();
    candidates.sort_by_key(|image| image.last_used);
    let mut used = used_bytes;
    for image in candidates {
        if used <= thresholds.low_bytes {
            break;
        }
        for (layer, bytes) in &image.layers {
            if let Some(count) = holders.get_mut(layer) {
                *count -= 1;
                if *count == 0 {
                    used = used.saturating_sub(*bytes);
                }
            }
        }
        chosen.insert(image.id.clone());
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_000_000;

    fn image(name: &str, last_used: i64, used_by: &[&str], layers: &[(&str, u64)]) -> Summary {
        let at = Timestamp::from_second(NOW - last_used).unwrap();
        Summary {
            id: Digest::of(name),
            names: vec![name.to_owned()],
            manifest: None,
            bytes: 0,
            added_at: at,
            last_used: at,
            used_by: used_by.iter().map(|&user| user.to_owned()).collect(),
            layers: layers
                .iter()
                .map(|(layer, bytes)| (Digest::of(layer), *bytes))
                .collect(),
        }
    }

    fn chosen(images: &[Summary], used: u64, high: u64, low: u64) -> Vec<String> {
        let thresholds = Thresholds {
            high_bytes: high,
            low_bytes: low,
            minimum_age: SignedDuration::from_secs(120),
        };
        let chosen = choose(
            images,
            used,
            thresholds,
            Timestamp::from_second(NOW).unwrap(),
        );
        images
            .iter()
            .filter(|image| chosen.contains(&image.id))
            .map(|image| image.names[0].clone())
            .collect()
    }

    #[test]
    fn images_are_removed_least_recently_used_first_down_to_the_low_threshold() {
        let images = [
            image("new", 200, &[], &[("n", 10)]),
            image("old", 900, &[], &[("o", 10)]),
            image("older", 1000, &[], &[("p", 10)]),
        ];
        assert!(
            chosen(&images, 30, 30, 10).is_empty(),
            "at the threshold, not above it"
        );
        assert_eq!(chosen(&images, 31, 30, 25), ["older"]);
        assert_eq!(chosen(&images, 31, 30, 15), ["old", "older"]);
    }

    #[test]
    fn images_in_use_or_recently_used_are_never_removed() {
        let images = [
            image("running", 5000, &["pod"], &[("r", 10)]),
            image("fresh", 10, &[], &[("f", 10)]),
        ];
        assert!(chosen(&images, 1000, 1, 0).is_empty());
    }

    #[test]
    fn a_shared_layer_frees_space_only_with_its_last_image() {
        let images = [
            image("a", 1000, &[], &[("shared", 100), ("a", 1)]),
            image("b", 900, &[], &[("shared", 100), ("b", 1)]),
            image("c", 800, &[], &[("c", 1)]),
        ];
        assert_eq!(chosen(&images, 103, 100, 50), ["a", "b"]);
    }
}
