//! The W3C trace context as it is passed between processes. Baggage and vendor formats are not supported.

use std::collections::BTreeMap;

/// The name of the header, and of the key in the annotation.
pub const TRACEPARENT: &str = "traceparent";
/// The name of the header, and of the key in the annotation.
pub const TRACESTATE: &str = "tracestate";
/// The maximum length of `tracestate`. Longer values are dropped, as the standard allows.
const TRACESTATE_MAX: usize = 512;

/// A well-formed trace context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    traceparent: String,
    tracestate: Option<String>,
}

impl TraceContext {
    /// Parses the two headers. Returns `None` if `traceparent` is malformed; a malformed `tracestate` is dropped.
    pub fn new(traceparent: &str, tracestate: Option<&str>) -> Option<Self> {
        is_traceparent(traceparent).then(|| Self {
            traceparent: traceparent.to_owned(),
            tracestate: tracestate
                .filter(|state| !state.is_empty() && state.len() <= TRACESTATE_MAX)
                .map(str::to_owned),
        })
    }

    /// Parses the annotation: a JSON object of headers.
    pub fn from_annotation(annotation: &str) -> Option<Self> {
        let carrier: BTreeMap<String, String> = serde_json::from_str(annotation).ok()?;
        Self::new(
            carrier.get(TRACEPARENT)?,
            carrier.get(TRACESTATE).map(String::as_str),
        )
    }

    /// The context as an annotation value.
    pub fn to_annotation(&self) -> String {
        let carrier: BTreeMap<&str, &str> = self.headers().collect();
        serde_json::to_string(&carrier).unwrap_or_default()
    }

    /// The context as HTTP headers.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let state = self.tracestate.as_deref().map(|state| (TRACESTATE, state));
        std::iter::once((TRACEPARENT, self.traceparent.as_str())).chain(state)
    }

    pub fn traceparent(&self) -> &str {
        &self.traceparent
    }

    pub fn tracestate(&self) -> Option<&str> {
        self.tracestate.as_deref()
    }

    /// The 32 hexadecimal digits that all spans of the trace share.
    pub fn trace_id(&self) -> &str {
        &self.traceparent[3..35]
    }
}

/// `00-<32 hex>-<16 hex>-<2 hex>` with non-zero IDs. Later versions may have more fields after these.
fn is_traceparent(text: &str) -> bool {
    let is_hex = |part: &str, length: usize| {
        part.len() == length
            && part
                .bytes()
                .all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let is_id = |part: &str, length| is_hex(part, length) && part.bytes().any(|byte| byte != b'0');
    let mut parts = text.split('-');
    let (Some(version), Some(trace), Some(parent), Some(flags)) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return false;
    };
    let ends_here = parts.next().is_none();
    is_hex(version, 2)
        && version != "ff"
        && (version != "00" || ends_here)
        && is_id(trace, 32)
        && is_id(parent, 16)
        && is_hex(flags, 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_context_survives_the_annotation() {
        let context = TraceContext::new(PARENT, Some("vendor=1")).unwrap();
        let annotation = context.to_annotation();
        assert_eq!(
            annotation,
            format!(r#"{{"traceparent":"{PARENT}","tracestate":"vendor=1"}}"#)
        );
        assert_eq!(TraceContext::from_annotation(&annotation), Some(context));
    }

    #[test]
    fn malformed_contexts_are_refused() {
        for bad in [
            "",
            "{}",
            "[]",
            "traceparent",
            r#"{"traceparent":1}"#,
            r#"{"traceparent":"00-a-b-01"}"#,
            r#"{"traceparent":"00-00000000000000000000000000000000-00f067aa0ba902b7-01"}"#,
            r#"{"traceparent":"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more"}"#,
            r#"{"traceparent":"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01"}"#,
        ] {
            assert_eq!(TraceContext::from_annotation(bad), None, "{bad}");
        }
        let later = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more";
        assert!(TraceContext::new(later, None).is_some());
    }

    #[test]
    fn the_trace_id_is_parsed() {
        let context = TraceContext::new(PARENT, Some("")).unwrap();
        assert_eq!(context.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(context.tracestate(), None);
    }
}
