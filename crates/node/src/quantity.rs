//! What the node reads from quantities of resources. Kubernetes' grammar is in [`apimachinery::quantity`].

use apimachinery::quantity::Quantity;

/// A non-negative quantity in thousandths, rounded up. `None` if it is negative or does not parse.
pub fn milli(text: &str) -> Option<u64> {
    let quantity: Quantity = text.parse().ok()?;
    u64::try_from(quantity.milli_value()).ok()
}

/// A non-negative quantity in whole units, rounded up. `None` if it is negative or does not parse.
pub fn units(text: &str) -> Option<u64> {
    let quantity: Quantity = text.parse().ok()?;
    u64::try_from(quantity.value()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_round_up_and_are_not_negative() {
        for (text, in_thousandths, in_units) in [
            ("1", Some(1000), Some(1)),
            ("1500m", Some(1500), Some(2)),
            (".5", Some(500), Some(1)),
            ("1n", Some(1), Some(1)),
            ("64Mi", Some(67_108_864_000), Some(67_108_864)),
            ("2e3", Some(2_000_000), Some(2000)),
            ("-1", None, None),
            ("1Q", None, None),
        ] {
            assert_eq!(milli(text), in_thousandths, "{text}");
            assert_eq!(units(text), in_units, "{text}");
        }
    }
}
