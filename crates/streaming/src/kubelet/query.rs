//! Query parameters. The kubelet and the API server use different names for the streams; both are accepted.

use super::backend::{Error, LogRequest, LogStream, Since, Target};
use crate::remote_command::Streams;

/// Each port needs two channel numbers, and a channel number is one byte.
const PORTS_MAX: usize = 127;

/// The name-value pairs of a query string, in order.
#[derive(Debug, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    pub fn parse(query: Option<&str>) -> Self {
        let pairs = query
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty());
        Self(pairs.map(decode_pair).collect())
    }

    fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0
            .iter()
            .filter(move |(known, _)| known == name)
            .map(|(_, value)| value.as_str())
    }

    fn first<'a>(&'a self, name: &'a str) -> Option<&'a str> {
        self.all(name).next()
    }

    /// Parses a boolean as Kubernetes does: absent, `0` and `false` are false, anything else is true.
    fn flag(&self, name: &str) -> bool {
        self.first(name)
            .is_some_and(|value| value != "0" && !value.eq_ignore_ascii_case("false"))
    }

    fn number(&self, name: &str) -> Result<Option<i64>, Error> {
        match self.first(name) {
            None | Some("") => Ok(None),
            Some(value) => value
                .parse()
                .map(Some)
                .map_err(|_| Error::Invalid(format!("{name}: {value:?} is not a number"))),
        }
    }

    pub fn command(&self) -> Vec<String> {
        self.all("command").map(str::to_owned).collect()
    }

    pub fn streams(&self) -> Result<Streams, Error> {
        let tty = self.flag("tty");
        let streams = Streams {
            stdin: self.flag("input") || self.flag("stdin"),
            stdout: self.flag("output") || self.flag("stdout"),
            // A terminal combines stdout and stderr into one stream.
            stderr: (self.flag("error") || self.flag("stderr")) && !tty,
            tty,
        };
        if streams.stdin || streams.stdout || streams.stderr {
            Ok(streams)
        } else {
            let message = "you must specify at least 1 of stdin, stdout, stderr";
            Err(Error::Invalid(message.into()))
        }
    }

    /// The ports in the query string, for protocols whose streams do not name them. Each parameter may list several ports.
    pub fn ports(&self) -> Result<Vec<u16>, Error> {
        let listed = self.all("port").chain(self.all("ports"));
        let ports = listed
            .flat_map(|value| value.split(','))
            .map(|value| match value.parse() {
                Ok(port @ 1..) => Ok(port),
                _ => Err(Error::Invalid(format!(
                    "unable to parse {value:?} as a port"
                ))),
            })
            .collect::<Result<Vec<u16>, Error>>()?;
        match ports.len() {
            0 => Err(Error::Invalid(
                "query parameter \"port\" is required".into(),
            )),
            1..=PORTS_MAX => Ok(ports),
            _ => Err(Error::Invalid(format!("more than {PORTS_MAX} ports"))),
        }
    }

    pub fn logs(&self, target: Target) -> Result<LogRequest, Error> {
        let tail = match self.first("tail") {
            Some("all") => None,
            Some(_) => self.number("tail")?,
            None => self.number("tailLines")?,
        };
        let seconds = self.number("sinceSeconds")?.map(|seconds| {
            (seconds > 0)
                .then_some(Since::Seconds(seconds))
                .ok_or_else(|| Error::Invalid("sinceSeconds must be greater than 0".into()))
        });
        let time = self
            .first("sinceTime")
            .filter(|time| !time.is_empty())
            .map(|time| {
                time.parse()
                    .map(Since::Time)
                    .map_err(|_| Error::Invalid(format!("sinceTime: {time:?} is not a time")))
            });
        let since = match (seconds, time) {
            (Some(_), Some(_)) => {
                let message = "at most one of sinceTime or sinceSeconds may be specified";
                return Err(Error::Invalid(message.into()));
            }
            (since, None) | (None, since) => since.transpose()?,
        };
        Ok(LogRequest {
            target,
            follow: self.flag("follow"),
            previous: self.flag("previous"),
            timestamps: self.flag("timestamps"),
            since,
            tail_lines: at_least("tailLines", tail, 0)?,
            limit_bytes: at_least("limitBytes", self.number("limitBytes")?, 1)?,
            stream: match self.first("stream") {
                None | Some("" | "All") => LogStream::All,
                Some("Stdout") => LogStream::Stdout,
                Some("Stderr") => LogStream::Stderr,
                Some(other) => {
                    return Err(Error::Invalid(format!("invalid stream type {other:?}")));
                }
            },
        })
    }
}

fn at_least(name: &str, value: Option<i64>, least: u64) -> Result<Option<u64>, Error> {
    value
        .map(|value| u64::try_from(value).ok().filter(|value| *value >= least))
        .map(|value| {
            value.ok_or_else(|| Error::Invalid(format!("{name} must be at least {least}")))
        })
        .transpose()
}

fn decode_pair(pair: &str) -> (String, String) {
    let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
    (decode(name), decode(value))
}

/// Decodes percent-encoding and `+` as a space. An invalid escape sequence stays as it is.
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut position = 0;
    while let Some(byte) = bytes.get(position) {
        let escaped = (*byte == b'%')
            .then(|| bytes.get(position + 1..position + 3))
            .flatten()
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        if let Some(escaped) = escaped {
            decoded.push(escaped);
            position += 3;
        } else {
            decoded.push(if *byte == b'+' { b' ' } else { *byte });
            position += 1;
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests {
    use super::super::backend::TargetPod;
    use super::*;

    fn query(text: &str) -> Query {
        Query::parse(Some(text))
    }

    fn target() -> Target {
        Target {
            pod: TargetPod {
                namespace: "default".into(),
                name: "a".into(),
                uid: None,
            },
            container: "main".into(),
        }
    }

    #[test]
    fn a_command_keeps_its_order_and_odd_characters() {
        let command = query("command=sh&command=-c&command=echo+a%26b%20%C3%BC%zz&tty=0").command();
        assert_eq!(command, ["sh", "-c", "echo a&b ü%zz"]);
    }

    #[test]
    fn streams_are_accepted_under_kubelet_and_api_names() {
        let kubelets = query("input=1&output=1&error=1").streams();
        assert_eq!(
            kubelets,
            query("stdin=true&stdout=true&stderr=true").streams()
        );
        let terminal = query("output=1&error=1&tty=1").streams().unwrap();
        assert!(terminal.tty && !terminal.stderr);
        assert!(query("input=0&stdout=false").streams().is_err());
    }

    #[test]
    fn ports_may_be_repeated_and_listed() {
        assert_eq!(
            query("port=80&port=443,8080").ports(),
            Ok(vec![80, 443, 8080])
        );
        for bad in ["", "port=", "port=0", "port=65536", "port=80,x"] {
            assert!(query(bad).ports().is_err(), "{bad}");
        }
        assert!(query(&vec!["port=1"; 128].join("&")).ports().is_err());
    }

    #[test]
    fn log_options_are_parsed_and_validated() {
        let logs = query(
            "follow=true&tailLines=10&sinceTime=2026-01-02T03:04:05Z&limitBytes=5&timestamps=1",
        );
        let logs = logs.logs(target()).unwrap();
        assert!(logs.follow && logs.timestamps && !logs.previous);
        assert_eq!((logs.tail_lines, logs.limit_bytes), (Some(10), Some(5)));
        assert_eq!(
            logs.since,
            Some(Since::Time("2026-01-02T03:04:05Z".parse().unwrap()))
        );
        for bad in [
            "tailLines=-1",
            "tailLines=x",
            "limitBytes=0",
            "sinceSeconds=0",
            "sinceSeconds=1&sinceTime=2026-01-02T03:04:05Z",
            "sinceTime=yesterday",
            "stream=Both",
        ] {
            assert!(query(bad).logs(target()).is_err(), "{bad}");
        }
    }
}
