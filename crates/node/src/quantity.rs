//! Kubernetes quantities (`1500m`, `64Mi`, `2e3`), as far as limits need them: exact, in thousandths.

/// A non-negative quantity in thousandths, rounded up; `None` if it does not parse or does not fit.
pub fn milli(text: &str) -> Option<u128> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let (multiplier, exponent): (u128, i32) = match suffix {
        "" => (1, 0),
        "n" => (1, -9),
        "u" => (1, -6),
        "m" => (1, -3),
        "k" => (1, 3),
        "M" => (1, 6),
        "G" => (1, 9),
        "T" => (1, 12),
        "P" => (1, 15),
        "E" => (1, 18),
        "Ki" => (1 << 10, 0),
        "Mi" => (1 << 20, 0),
        "Gi" => (1 << 30, 0),
        "Ti" => (1 << 40, 0),
        "Pi" => (1 << 50, 0),
        "Ei" => (1 << 60, 0),
        _ => (
            1,
            suffix
                .strip_prefix(['e', 'E'])?
                .parse()
                .ok()
                .filter(|exponent: &i32| exponent.abs() <= 24)?,
        ),
    };
    let digits: u128 = format!("{whole}{fraction}").parse().ok()?;
    let shift = exponent + 3 - i32::try_from(fraction.len()).ok()?;
    let scaled = digits.checked_mul(multiplier)?;
    if shift >= 0 {
        scaled.checked_mul(10_u128.checked_pow(shift.unsigned_abs())?)
    } else {
        Some(scaled.div_ceil(10_u128.checked_pow(shift.unsigned_abs())?))
    }
}

/// A quantity in whole units, rounded up.
pub fn units(text: &str) -> Option<u64> {
    u64::try_from(milli(text)?.div_ceil(1000)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_in_every_notation() {
        for (text, expected) in [
            ("1", Some(1000)),
            ("1500m", Some(1500)),
            ("0.5", Some(500)),
            (".5", Some(500)),
            ("64Mi", Some(67_108_864_000)),
            ("1.5Gi", Some(1_610_612_736_000)),
            ("2e3", Some(2_000_000)),
            ("1E", Some(1_000_000_000_000_000_000_000)),
            ("12E2", Some(1_200_000)),
            ("1n", Some(1)),
            ("", None),
            ("Mi", None),
            ("1Q", None),
            ("-1", None),
        ] {
            assert_eq!(milli(text), expected, "{text}");
        }
        assert_eq!(units("100m"), Some(1));
    }
}
