//! Where logs go and what they look like. Takes the flags of controller-runtime's zap logger beside our own.

use std::fmt;

use k8s_openapi::jiff::{Timestamp, tz};
use telemetry::Exporter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::{EnvFilter, Layer};

/// Flags about logs.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub struct Args {
    /// How log lines look; json unless --zap-devel or --zap-encoder says otherwise.
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub log_format: Option<Format>,

    /// Logs for people: text, with details.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_parser = clap::builder::BoolishValueParser::new(), action = clap::ArgAction::Set)]
    pub zap_devel: bool,

    /// How log lines look, in zap's words.
    #[arg(long, value_enum, value_name = "ENCODER")]
    pub zap_encoder: Option<Encoder>,

    /// Least severe level to log: debug, info, error, panic, or a number for more detail.
    #[arg(long, value_name = "LEVEL")]
    pub zap_log_level: Option<Level>,

    /// Accepted for compatibility; errors are logged with their causes instead of a stack.
    #[arg(long, value_name = "LEVEL")]
    pub zap_stacktrace_level: Option<String>,

    /// How the time of a line is written.
    #[arg(long, value_enum, value_name = "ENCODING")]
    pub zap_time_encoding: Option<TimeEncoding>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Json,
    Text,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Encoder {
    Json,
    Console,
}

/// How the time of a log line is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum TimeEncoding {
    Epoch,
    Millis,
    Nano,
    Iso8601,
    Rfc3339,
    #[default]
    Rfc3339nano,
}

/// The least severe level that is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Error,
    Info,
    Debug,
    Trace,
}

impl std::str::FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "debug" => Ok(Self::Debug),
            "info" => Ok(Self::Info),
            "error" | "panic" => Ok(Self::Error),
            number => match number.parse::<u8>() {
                Ok(1) => Ok(Self::Debug),
                Ok(2..) => Ok(Self::Trace),
                _ => {
                    Err("expected debug, info, error, panic or a number greater than 0".to_owned())
                }
            },
        }
    }
}

impl Args {
    /// How log lines look.
    pub fn format(&self) -> Format {
        let encoded = self.zap_encoder.map(|encoder| match encoder {
            Encoder::Json => Format::Json,
            Encoder::Console => Format::Text,
        });
        let default = if self.zap_devel {
            Format::Text
        } else {
            Format::Json
        };
        self.log_format.or(encoded).unwrap_or(default)
    }

    fn level(&self) -> Level {
        let default = if self.zap_devel {
            Level::Debug
        } else {
            Level::Info
        };
        self.zap_log_level.unwrap_or(default)
    }

    /// Other crates' details are logged only when everything is asked for.
    fn filter(&self) -> EnvFilter {
        let directives = match self.level() {
            Level::Error => "error",
            Level::Info => "info",
            Level::Debug => "info,controllers=debug",
            Level::Trace => "trace",
        };
        EnvFilter::builder()
            .with_default_directive(tracing::level_filters::LevelFilter::INFO.into())
            .parse_lossy(directives)
    }
}

/// Starts logging to standard error, unless something else has already.
pub(super) fn start(args: &Args, exporter: Option<&Exporter>) {
    let lines = tracing_subscriber::fmt::layer()
        .with_timer(args.zap_time_encoding.unwrap_or_default())
        .with_writer(std::io::stderr);
    let lines = match args.format() {
        Format::Json => lines
            .json()
            .flatten_event(true)
            .with_current_span(true)
            .with_span_list(false)
            .boxed(),
        Format::Text => lines.boxed(),
    };
    // A program that embeds this one may have set up logging itself, and then knows best.
    let _ = telemetry::export::install(lines.with_filter(args.filter()), exporter);
}

impl FormatTime for TimeEncoding {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        let now = Timestamp::now();
        match self {
            Self::Epoch => write!(
                writer,
                "{}.{:06}",
                now.as_second(),
                now.subsec_microsecond()
            ),
            Self::Millis => write!(writer, "{}", now.as_millisecond()),
            Self::Nano => write!(writer, "{}", now.as_nanosecond()),
            Self::Iso8601 => {
                let utc = now.to_zoned(tz::TimeZone::UTC);
                write!(writer, "{}", utc.strftime("%Y-%m-%dT%H:%M:%S.%3fZ"))
            }
            Self::Rfc3339 => {
                let utc = now.to_zoned(tz::TimeZone::UTC);
                write!(writer, "{}", utc.strftime("%Y-%m-%dT%H:%M:%SZ"))
            }
            Self::Rfc3339nano => write!(writer, "{now}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_flag_wins_over_zaps_and_zaps_over_the_default() {
        let args = Args::default();
        assert_eq!((args.format(), args.level()), (Format::Json, Level::Info));
        let args = Args {
            zap_devel: true,
            ..Args::default()
        };
        assert_eq!((args.format(), args.level()), (Format::Text, Level::Debug));
        let args = Args {
            zap_encoder: Some(Encoder::Console),
            log_format: Some(Format::Json),
            zap_log_level: Some("error".parse().unwrap()),
            ..Args::default()
        };
        assert_eq!((args.format(), args.level()), (Format::Json, Level::Error));
    }

    #[test]
    fn levels_are_words_or_numbers() {
        for (text, level) in [
            ("DEBUG", Level::Debug),
            ("1", Level::Debug),
            ("5", Level::Trace),
        ] {
            assert_eq!(text.parse(), Ok(level));
        }
        for bad in ["0", "-1", "loud", ""] {
            assert!(bad.parse::<Level>().is_err(), "{bad}");
        }
    }
}
