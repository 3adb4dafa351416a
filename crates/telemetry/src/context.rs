//! The W3C trace context, as it travels between processes. No baggage, no vendor's format.

use std::collections::BTreeMap;

/// The header, and the key in the annotation.
pub const TRACEPARENT: &str = "traceparent";
/// The header, and the key in the annotation.
pub const TRACESTATE: &str = "tracestate";
/// No vendor may be trusted to send less: longer ones are dropped, as the standard allows.
const TRACESTATE_MAX: usize = 512;

/// A context that is well formed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    traceparent: String,
    tracestate: Option<String>,
}

impl TraceContext {
    /// A context from the two headers. `None` unless the first is well formed; a second that is not is left out.
    pub fn new(traceparent: &str, tracestate: Option<&str>) -> Option<Self> {
        is_traceparent(traceparent).then(|| Self {
            traceparent: traceparent.to_owned(),
            tracestate: tracestate
                .filter(|state| !state.is_empty() && state.len() <= TRACESTATE_MAX)
                .map(str::to_owned),
        })
    }

    /// A context from the annotation: a JSON object of headers.
    pub fn from_annotation(annotation: &str) -> Option<Self> {
        let carrier: BTreeMap<String, String> = serde_json::from_str(annotation).ok()?;
        Self::new(
            carrier.get(TRACEPARENT)?,
            carrier.get(TRACESTATE).map(String::as_str),
        )
    }

    /// The annotation that says this.
    pub fn to_annotation(&self) -> String {
        let carrier: BTreeMap<&str, &str> = self.headers().collect();
        serde_json::to_string(&carrier).unwrap_or_default()
    }

    /// The headers that say this.
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

/// `00-<32 hex>-<16 hex>-<2 hex>`, neither id all zeros. Later versions may go on after that.
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
    fn what_is_not_a_context_is_none() {
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
    fn the_trace_is_told() {
        let context = TraceContext::new(PARENT, Some("")).unwrap();
        assert_eq!(context.trace_id(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(context.tracestate(), None);
    }
}
