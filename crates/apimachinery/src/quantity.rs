//! Resource quantities (`100m`, `1.5Gi`, `1e3`) with the parsing, canonical form and order of Kubernetes.
//!
//! A quantity is a decimal number with at most nine decimal places. Smaller fractions are rounded away from zero, so that a small
//! request never becomes zero.

use std::cmp::Ordering;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
    )]
    Format,
    #[error("unable to parse numeric part of quantity")]
    Numeric,
    #[error("unable to parse quantity's suffix")]
    Suffix,
}

/// The suffix family of a quantity, in which it was written and is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `1e3`
    DecimalExponent,
    /// `1Ki`
    BinarySi,
    /// `1k`
    DecimalSi,
}

/// `mantissa × 10^scale`, with `scale ≥ -9`.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    mantissa: i128,
    scale: i32,
    format: Format,
}

const BINARY: [(&str, u32); 6] = [
    ("Ki", 10),
    ("Mi", 20),
    ("Gi", 30),
    ("Ti", 40),
    ("Pi", 50),
    ("Ei", 60),
];
const DECIMAL: [(&str, i32); 10] = [
    ("n", -9),
    ("u", -6),
    ("m", -3),
    ("", 0),
    ("k", 3),
    ("M", 6),
    ("G", 9),
    ("T", 12),
    ("P", 15),
    ("E", 18),
];
const MIN_SCALE: i32 = -9;
/// The largest accepted exponent. Larger ones describe no resource and would only make arithmetic slow.
const MAX_EXPONENT: i32 = 1_000;
const MAX_DIGITS: usize = 28;

enum Suffix {
    Decimal(i32, Format),
    Binary(u32),
}

fn suffix(text: &str) -> Option<Suffix> {
    if let Some((_, scale)) = DECIMAL.iter().find(|(name, _)| *name == text) {
        return Some(Suffix::Decimal(*scale, Format::DecimalSi));
    }
    if let Some((_, shift)) = BINARY.iter().find(|(name, _)| *name == text) {
        return Some(Suffix::Binary(*shift));
    }
    let exponent = text.strip_prefix(['e', 'E'])?;
    let exponent: i32 = exponent.parse().ok()?;
    (exponent.abs() <= MAX_EXPONENT).then_some(Suffix::Decimal(exponent, Format::DecimalExponent))
}

impl std::str::FromStr for Quantity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let (negative, unsigned) = match text.as_bytes().first() {
            None => return Err(Error::Format),
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            Some(_) => (false, text),
        };
        let number_end = unsigned
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(unsigned.len());
        let (number, suffix_text) = unsigned.split_at(number_end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
            return Err(Error::Format);
        }
        if !suffix_text
            .bytes()
            .all(|b| b"eEinumkKMGTP+-0123456789".contains(&b))
        {
            return Err(Error::Format);
        }
        let suffix = suffix(suffix_text).ok_or(Error::Suffix)?;
        let digits: String = whole.chars().chain(fraction.chars()).collect();
        let digits = digits.trim_start_matches('0');
        if digits.len() > MAX_DIGITS {
            return Err(Error::Numeric);
        }
        let mut mantissa: i128 = if digits.is_empty() {
            0
        } else {
            digits.parse().map_err(|_| Error::Numeric)?
        };
        let places = i32::try_from(fraction.len()).map_err(|_| Error::Numeric)?;
        let (scale, mut format) = match suffix {
            Suffix::Decimal(exponent, format) => (exponent - places, format),
            Suffix::Binary(shift) => {
                // 28 digits times 2^60 can exceed i128: such a quantity is above the limit anyway.
                mantissa = mantissa.checked_mul(1_i128 << shift).unwrap_or(i128::MAX);
                (-places, Format::BinarySi)
            }
        };
        let mut quantity = Quantity {
            mantissa,
            scale,
            format,
        }
        .rounded();
        if format == Format::BinarySi {
            let limit = Quantity::from(i64::MAX);
            if quantity > limit {
                quantity = Quantity { format, ..limit };
            }
            if quantity.mantissa > 0 && quantity < Quantity::from(1) {
                format = Format::DecimalSi;
            }
        }
        if negative {
            quantity.mantissa = -quantity.mantissa;
        }
        Ok(Quantity { format, ..quantity })
    }
}

impl From<i64> for Quantity {
    fn from(value: i64) -> Self {
        Self {
            mantissa: value.into(),
            scale: 0,
            format: Format::DecimalSi,
        }
    }
}

impl Quantity {
    /// A number of bytes, printed with binary suffixes.
    pub fn bytes(value: i64) -> Self {
        Self {
            format: Format::BinarySi,
            ..Self::from(value)
        }
    }

    /// A number of thousandths, as of CPU cores.
    pub fn milli(value: i64) -> Self {
        Self {
            scale: -3,
            ..Self::from(value)
        }
    }

    fn rounded(mut self) -> Self {
        while self.scale < MIN_SCALE && self.mantissa != 0 {
            let remainder = self.mantissa % 10;
            self.mantissa /= 10;
            self.scale += 1;
            if remainder != 0 {
                // Round away from zero: carry once, whatever digits follow.
                self.mantissa += remainder.signum();
            }
        }
        if self.mantissa == 0 {
            self.scale = 0;
        }
        self
    }

    pub fn is_zero(&self) -> bool {
        self.mantissa == 0
    }

    /// The sign: -1, 0 or 1.
    pub fn sign(&self) -> i32 {
        match self.mantissa.cmp(&0) {
            Ordering::Less => -1,
            Ordering::Equal => 0,
            Ordering::Greater => 1,
        }
    }

    pub fn is_integer(&self) -> bool {
        let canonical = self.without_trailing_zeros();
        canonical.scale >= 0
    }

    /// The value in units of 10^`scale`, rounded away from zero. Saturates at the limits of `i64`.
    fn scaled(&self, scale: i32) -> i64 {
        let saturated = if self.mantissa < 0 {
            i64::MIN
        } else {
            i64::MAX
        };
        let mut value = self.mantissa;
        let shift = self.scale - scale;
        if shift >= 0 {
            for _ in 0..shift {
                match value.checked_mul(10) {
                    Some(next) if value != 0 => value = next,
                    Some(_) => break,
                    None => return saturated,
                }
            }
        } else {
            let mut rest = 0;
            for _ in shift..0 {
                rest |= value % 10;
                value /= 10;
                if value == 0 && rest == 0 {
                    break;
                }
            }
            if rest != 0 {
                value += self.mantissa.signum();
            }
        }
        i64::try_from(value).unwrap_or(saturated)
    }

    /// The value in whole units, rounded up.
    pub fn value(&self) -> i64 {
        self.scaled(0)
    }

    /// The value in thousandths, rounded up.
    pub fn milli_value(&self) -> i64 {
        self.scaled(-3)
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "the function returns an approximation"
    )]
    pub fn as_f64(&self) -> f64 {
        self.mantissa as f64 * 10f64.powi(self.scale)
    }

    /// The sum in this quantity's format (in the other's if this is zero), or `None` on overflow.
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        let (low, high) = if self.scale <= other.scale {
            (self, other)
        } else {
            (other, self)
        };
        let mut mantissa = high.mantissa;
        for _ in low.scale..high.scale {
            mantissa = mantissa.checked_mul(10)?;
        }
        Some(Self {
            mantissa: mantissa.checked_add(low.mantissa)?,
            scale: low.scale,
            format: if self.is_zero() {
                other.format
            } else {
                self.format
            },
        })
    }

    /// The difference, in this quantity's format.
    #[must_use]
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.checked_add(Self {
            mantissa: -other.mantissa,
            ..other
        })
    }

    fn without_trailing_zeros(mut self) -> Self {
        if self.mantissa == 0 {
            self.scale = 0;
            return self;
        }
        while self.mantissa % 10 == 0 {
            self.mantissa /= 10;
            self.scale += 1;
        }
        self
    }

    fn decimal(&self, exponential: bool) -> String {
        let mut number = self.without_trailing_zeros();
        while number.scale.rem_euclid(3) != 0 {
            number.mantissa *= 10;
            number.scale -= 1;
        }
        let si = DECIMAL.iter().find(|(_, scale)| *scale == number.scale);
        match si {
            _ if number.scale == 0 => number.mantissa.to_string(),
            Some((name, _)) if !exponential => format!("{}{name}", number.mantissa),
            _ => format!("{}e{}", number.mantissa, number.scale),
        }
    }

    fn binary(&self) -> String {
        let mut value = self.value();
        let mut suffix = "";
        for (name, _) in BINARY {
            if value % 1024 != 0 {
                break;
            }
            value /= 1024;
            suffix = name;
        }
        format!("{value}{suffix}")
    }
}

impl std::fmt::Display for Quantity {
    /// Writes the canonical form: no fraction, and the largest suffix without loss of precision.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let small = *self > Quantity::from(-1024) && *self < Quantity::from(1024);
        f.write_str(&match self.format {
            // A binary suffix would round a fraction, so a decimal suffix is used then.
            Format::BinarySi if !small && self.is_integer() => self.binary(),
            Format::DecimalExponent => self.decimal(true),
            Format::BinarySi | Format::DecimalSi => self.decimal(false),
        })
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        let signs = self.sign().cmp(&other.sign());
        if signs != Ordering::Equal || self.is_zero() {
            return signs;
        }
        let (left, right) = (
            self.without_trailing_zeros(),
            other.without_trailing_zeros(),
        );
        let magnitude = |q: &Quantity| {
            let digits = q.mantissa.unsigned_abs().ilog10();
            i64::from(digits) + i64::from(q.scale)
        };
        let by_magnitude = magnitude(&left).cmp(&magnitude(&right));
        let ordering = by_magnitude.then_with(|| {
            // The magnitudes are equal, so the scales differ by at most the number of digits and aligning rarely overflows. If it
            // does, the shorter mantissa only lacks trailing zeros.
            let (mut l, mut r) = (left.mantissa.unsigned_abs(), right.mantissa.unsigned_abs());
            for _ in right.scale..left.scale {
                l = l.saturating_mul(10);
            }
            for _ in left.scale..right.scale {
                r = r.saturating_mul(10);
            }
            l.cmp(&r)
        });
        if self.mantissa < 0 {
            ordering.reverse()
        } else {
            ordering
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Quantity {
        text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn quantities_print_in_canonical_form() {
        let cases = [
            ("0", "0"),
            ("100m", "100m"),
            ("1500m", "1500m"),
            ("1000m", "1"),
            ("0.5", "500m"),
            ("1.5Gi", "1536Mi"),
            ("1024Ki", "1Mi"),
            ("1025Ki", "1025Ki"),
            ("100000", "100k"),
            ("12E", "12E"),
            ("1e3", "1e3"),
            ("1E6", "1e6"),
            ("12e6", "12e6"),
            ("0.1Ki", "102400m"),
            ("1023", "1023"),
            ("-1Gi", "-1Gi"),
            ("+5", "5"),
            (".5", "500m"),
            ("5.", "5"),
            ("1n", "1n"),
            ("0.5n", "1n"),
            ("-0.5n", "-1n"),
            ("0.0000000001", "1n"),
            ("1000Ki", "1000Ki"),
            ("500Ki", "500Ki"),
            ("9999999999999Gi", "9223372036854775807"),
            ("0.1Mi", "104857600m"),
            ("1e30", "1e30"),
        ];
        for (text, canonical) in cases {
            assert_eq!(parse(text).to_string(), canonical, "{text}");
        }
    }

    #[test]
    fn quantities_compare_by_value_not_by_spelling() {
        assert_eq!(parse("1"), parse("1000m"));
        assert_eq!(parse("1Ki"), parse("1024"));
        assert!(parse("1Gi") > parse("1G"));
        assert!(parse("-2") < parse("-1"));
        assert!(parse("-20") < parse("-1"));
        assert!(parse("1e30") > parse("9E"));
        assert!(parse("1n") > parse("0"));
        assert!(parse("1e100") > parse("1n"));
    }

    #[test]
    fn values_round_up() {
        assert_eq!(parse("100m").value(), 1);
        assert_eq!(parse("-100m").value(), -1);
        assert_eq!(parse("1.5").milli_value(), 1500);
        assert_eq!(parse("1Gi").value(), 1 << 30);
        assert_eq!(parse("1e30").value(), i64::MAX);
        assert_eq!(parse("0e900").milli_value(), 0);
    }

    #[test]
    fn malformed_quantities_are_refused() {
        for text in [
            "", "abc", "1.2.3", "1Kii", "1e", "--1", "1 ", ".", "+", "1e99999", "1é",
        ] {
            assert!(text.parse::<Quantity>().is_err(), "{text}");
        }
    }

    #[test]
    fn sums_keep_the_format() {
        let sum = parse("1Gi").checked_add(parse("1Mi")).unwrap();
        assert_eq!(sum.to_string(), "1025Mi");
        let difference = parse("1").checked_sub(parse("250m")).unwrap();
        assert_eq!(difference.to_string(), "750m");
    }
}
