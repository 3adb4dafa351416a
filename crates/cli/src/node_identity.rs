//! Labels and taints of a Node, as the flags `--node-labels` and `--register-with-taints` write them. A kubelet has the same flags.

use k8s_openapi::api::core::v1::Taint;

/// Reads `KEY=VALUE`. The API server validates what KEY and VALUE may be.
pub fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .filter(|(key, _)| !key.is_empty())
        .ok_or_else(|| "write it as KEY=VALUE".to_owned())?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Reads `KEY=VALUE:EFFECT` or `KEY:EFFECT`.
pub fn taint(text: &str) -> Result<Taint, String> {
    let (front, effect) = text
        .rsplit_once(':')
        .ok_or_else(|| "write it as KEY=VALUE:EFFECT".to_owned())?;
    if !["NoSchedule", "PreferNoSchedule", "NoExecute"].contains(&effect) {
        return Err("the effect is NoSchedule, PreferNoSchedule or NoExecute".to_owned());
    }
    let (key, value) = front.split_once('=').unwrap_or((front, ""));
    if key.is_empty() {
        return Err("write it as KEY=VALUE:EFFECT".to_owned());
    }
    Ok(Taint {
        key: key.to_owned(),
        value: (!value.is_empty()).then(|| value.to_owned()),
        effect: effect.to_owned(),
        time_added: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_and_taints_are_read_as_a_kubelet_reads_them() {
        let pair = |key: &str, value: &str| Ok((key.to_owned(), value.to_owned()));
        assert_eq!(label("pool=fast"), pair("pool", "fast"));
        assert_eq!(label("pool="), pair("pool", ""));
        assert!(label("pool").is_err() && label("=fast").is_err());
        let read = |text| {
            let taint = taint(text).unwrap();
            (taint.key, taint.value, taint.effect)
        };
        let expected = |value: Option<&str>| {
            let value = value.map(str::to_owned);
            ("example.com/a".to_owned(), value, "NoSchedule".to_owned())
        };
        assert_eq!(read("example.com/a=b:NoSchedule"), expected(Some("b")));
        assert_eq!(read("example.com/a=:NoSchedule"), expected(None));
        assert_eq!(read("example.com/a:NoSchedule"), expected(None));
        for bad in ["a=b", "a=b:Never", "=b:NoExecute", ":NoExecute"] {
            assert!(taint(bad).is_err(), "{bad}");
        }
    }
}
