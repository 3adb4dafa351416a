//! Timestamps and durations.

use jiff::Timestamp;
use jiff::tz::{Offset, TimeZone};

use super::super::eval::{Error, Result};
use super::super::value::Value;

pub(super) fn parse<'a>(name: &str, argument: &Value<'a>) -> Result<Value<'a>> {
    match (name, argument) {
        ("timestamp", Value::Timestamp(_)) | ("duration", Value::Duration(_)) => {
            Ok(argument.clone())
        }
        ("timestamp", Value::Int(seconds)) => Timestamp::from_second(*seconds)
            .map(Value::Timestamp)
            .map_err(|_| Error::Other("timestamp overflow".to_owned())),
        ("timestamp", Value::String(text)) => text
            .parse()
            .map(Value::Timestamp)
            .map_err(|_| Error::Other(format!("parsing time {} failed", crate::go::quote(text)))),
        ("duration", Value::String(text)) => crate::duration::parse(text)
            .map(|duration| Value::Duration(duration.0))
            .map_err(|error| Error::Other(error.to_string())),
        _ => Err(Error::NoSuchOverload),
    }
}

pub(super) fn method<'a>(
    target: &Value<'a>,
    name: &str,
    arguments: &[Value<'a>],
) -> Result<Value<'a>> {
    match target {
        Value::Duration(nanos) if arguments.is_empty() => {
            let unit = match name {
                "getHours" => 3_600_000_000_000,
                "getMinutes" => 60_000_000_000,
                "getSeconds" => 1_000_000_000,
                "getMilliseconds" => 1_000_000,
                _ => return Err(Error::NoSuchOverload),
            };
            Ok(Value::Int(nanos / unit))
        }
        Value::Timestamp(time) => {
            let zone = match arguments {
                [] => TimeZone::UTC,
                [Value::String(name)] => zone(name)?,
                _ => return Err(Error::NoSuchOverload),
            };
            let local = time.to_zoned(zone);
            let part = match name {
                "getFullYear" => i64::from(local.year()),
                "getMonth" => i64::from(local.month()) - 1,
                "getDate" => i64::from(local.day()),
                "getDayOfMonth" => i64::from(local.day()) - 1,
                "getDayOfWeek" => i64::from(local.weekday().to_sunday_zero_offset()),
                "getDayOfYear" => i64::from(local.day_of_year()) - 1,
                "getHours" => i64::from(local.hour()),
                "getMinutes" => i64::from(local.minute()),
                "getSeconds" => i64::from(local.second()),
                "getMilliseconds" => i64::from(local.millisecond()),
                _ => return Err(Error::NoSuchOverload),
            };
            Ok(Value::Int(part))
        }
        _ => Err(Error::NoSuchOverload),
    }
}

/// Parses `UTC` or a fixed offset such as `-08:30`. Named zones are not supported, because they need a time zone database.
fn zone(name: &str) -> Result<TimeZone> {
    let unknown = || Error::Other(format!("unknown time zone {name}"));
    if name == "UTC" || name == "Z" {
        return Ok(TimeZone::UTC);
    }
    let (sign, digits) = match name.as_bytes().first() {
        Some(b'-') => (-1, &name[1..]),
        Some(b'+') => (1, &name[1..]),
        _ => (1, name),
    };
    let (hours, minutes) = digits.split_once(':').ok_or_else(unknown)?;
    let hours: i32 = hours.parse().map_err(|_| unknown())?;
    let minutes: i32 = minutes.parse().map_err(|_| unknown())?;
    if !(0..24).contains(&hours) || !(0..60).contains(&minutes) {
        return Err(unknown());
    }
    let offset =
        Offset::from_seconds(sign * (hours * 3600 + minutes * 60)).map_err(|_| unknown())?;
    Ok(TimeZone::fixed(offset))
}
