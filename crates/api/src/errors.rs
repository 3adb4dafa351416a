//! How an error is told: with all its causes, once, where it is logged or shown.

use std::error::Error;

/// An error and its causes on one line. Of an answer that cannot be decoded, no text is told: it may quote a secret.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut cause = Some(error);
    while let Some(next) = cause {
        let is_undecodable = matches!(next.downcast_ref(), Some(kube::Error::SerdeError(_)));
        let message = if is_undecodable {
            "the answer cannot be read".to_owned()
        } else {
            next.to_string()
        };
        if !text.ends_with(&message) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&message);
        }
        cause = if is_undecodable { None } else { next.source() };
    }
    text
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Secret;

    use super::*;

    #[test]
    fn an_answer_that_cannot_be_decoded_is_not_quoted() {
        let error = serde_json::from_str::<Secret>(r#"{"data":"hunter2"}"#).unwrap_err();
        assert!(error.to_string().contains("hunter2"), "{error}");
        let told = chain(&kube::Error::SerdeError(error));
        assert_eq!(told, "the answer cannot be read");
    }
}
