//! The writes of controllers, from the API server's metrics.

use kube::Client;

/// The writes that the API server has served so far, without those of the fake node.
pub async fn writes(client: &Client) -> anyhow::Result<f64> {
    let request = http::Request::get("/metrics").body(Vec::new())?;
    Ok(writes_in(&client.request_text(request).await?))
}

/// Sums `apiserver_request_total` over the writes of the resources that controllers write.
fn writes_in(metrics: &str) -> f64 {
    metrics
        .lines()
        .filter(|line| line.starts_with("apiserver_request_total{"))
        .filter(|line| {
            let has = |label: &str| line.contains(label);
            let is_write = ["POST", "PUT", "PATCH", "APPLY", "DELETE"]
                .iter()
                .any(|verb| has(&format!("verb=\"{verb}\"")));
            let is_ours = has("resource=\"sandbox")
                || has("resource=\"events\"")
                || has("resource=\"networkpolicies\"");
            let is_pod = has("resource=\"pods\"") && has("subresource=\"\"");
            is_write && (is_ours || is_pod)
        })
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_writes_of_controllers_are_counted() {
        let metrics = r#"
apiserver_request_total{code="201",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="",verb="POST",version="v1"} 7
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="status",verb="PATCH",version="v1"} 100
apiserver_request_total{code="200",component="apiserver",dry_run="",group="agents.x-k8s.io",resource="sandboxes",scope="resource",subresource="status",verb="PATCH",version="v1beta1"} 5
apiserver_request_total{code="200",component="apiserver",dry_run="",group="agents.x-k8s.io",resource="sandboxes",scope="resource",subresource="",verb="GET",version="v1beta1"} 50
apiserver_request_total{code="200",component="apiserver",dry_run="",group="coordination.k8s.io",resource="leases",scope="resource",subresource="",verb="PUT",version="v1"} 1
"#;
        assert!((writes_in(metrics) - 12.0).abs() < f64::EPSILON);
    }
}
