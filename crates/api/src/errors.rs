//! Prints an error with its causes, without the text of a response that may quote a secret.

use std::error::Error;

/// An error and its causes on one line. The chain ends at a response that cannot be decoded: its text may quote a secret.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut messages = Vec::new();
    for next in std::iter::once(error).chain(error_chain::causes(error)) {
        if matches!(next.downcast_ref(), Some(kube::Error::SerdeError(_))) {
            messages.push("the answer cannot be read".to_owned());
            break;
        }
        messages.push(next.to_string());
    }
    error_chain::join(messages)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Secret;

    use super::*;

    #[test]
    fn an_answer_that_cannot_be_decoded_is_not_quoted() {
        let error = serde_json::from_str::<Secret>(r#"{"data":"hunter2"}"#).unwrap_err();
        assert!(error.to_string().contains("hunter2"), "{error}");
        let text = chain(&kube::Error::SerdeError(error));
        assert_eq!(text, "the answer cannot be read");
    }
}
