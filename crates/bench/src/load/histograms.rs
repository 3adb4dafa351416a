//! The controller's histograms of latencies, read from its metrics before and after a load, to compare them with the latencies of the client.

use std::collections::BTreeMap;

use anyhow::Context;
use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::outcome::Check;
use super::recipe::Limits;

/// The histograms: latencies of claims since their creation and since the controller first observed them, and of sandboxes.
const HISTOGRAMS: [&str; 3] = [
    "agent_sandbox_claim_startup_latency_ms",
    "agent_sandbox_claim_controller_startup_latency_ms",
    "agent_sandbox_creation_latency_ms",
];

/// The path of the controller's metrics on the API server, in an installation by our manifests.
const SERVICE_PROXY: &str = "/api/v1/namespaces/agent-sandbox-system/services/agent-sandbox-controller:metrics/proxy/metrics";

/// Where to read the controller's metrics.
#[derive(Clone)]
pub enum Source {
    /// The controllers of this process.
    Process(std::sync::Arc<controllers::metrics::Metrics>),
    /// Its metrics endpoint.
    Address(String),
    /// Its service, through the API server.
    Service(kube::Client),
}

impl Source {
    /// The metrics as text.
    pub async fn read(&self) -> anyhow::Result<String> {
        match self {
            Self::Process(metrics) => Ok(metrics.exposition()),
            Self::Address(url) => fetch(url)
                .await
                .with_context(|| format!("cannot read metrics from {url}")),
            Self::Service(client) => {
                let request = http::Request::get(SERVICE_PROXY).body(Vec::new())?;
                Ok(client.request_text(request).await?)
            }
        }
    }
}

/// Gets a page over plain HTTP.
async fn fetch(url: &str) -> anyhow::Result<String> {
    let uri: http::Uri = url.parse().context("it is not a URL")?;
    anyhow::ensure!(
        uri.scheme_str() == Some("http"),
        "only http:// is supported; reach other endpoints with `kubectl port-forward`"
    );
    let authority = uri.authority().context("it names no host")?;
    let address = (authority.host(), authority.port_u16().unwrap_or(80));
    let path = match uri.path() {
        "" | "/" => "/metrics",
        path => path,
    };
    let mut connection = TcpStream::connect(address).await?;
    let request = format!("GET {path} HTTP/1.0\r\nHost: {authority}\r\n\r\n");
    connection.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).await?;
    let answer = String::from_utf8(answer).context("the answer is not text")?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("the answer is not HTTP")?;
    let status = head.lines().next().unwrap_or_default();
    anyhow::ensure!(status.contains(" 200"), "the answer is {status}");
    Ok(body.to_owned())
}

/// The cumulative buckets of each histogram, summed over its labels, in ascending order of their bounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histograms(BTreeMap<&'static str, Vec<(f64, f64)>>);

impl Histograms {
    /// Parses Prometheus' text format.
    pub fn parse(text: &str) -> Self {
        let mut histograms: BTreeMap<&'static str, Vec<(f64, f64)>> = BTreeMap::new();
        for line in text.lines() {
            for name in HISTOGRAMS {
                let Some(bucket) = line
                    .strip_prefix(name)
                    .and_then(|rest| rest.strip_prefix("_bucket{"))
                else {
                    continue;
                };
                if let Some((bound, count)) = bucket_of(bucket) {
                    add(histograms.entry(name).or_default(), bound, count);
                }
            }
        }
        for buckets in histograms.values_mut() {
            buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
        }
        Self(histograms)
    }

    /// The observations since an earlier reading.
    pub fn since(&self, before: &Self) -> Vec<Latencies> {
        let observed = self.0.iter().map(|(name, buckets)| {
            let mut buckets = buckets.clone();
            for (bound, count) in before.0.get(name).into_iter().flatten() {
                add(&mut buckets, *bound, -count);
            }
            Latencies::of(name, &buckets)
        });
        observed.filter(|latencies| latencies.count > 0.0).collect()
    }
}

fn add(buckets: &mut Vec<(f64, f64)>, bound: f64, count: f64) {
    match buckets
        .iter_mut()
        .find(|bucket| bucket.0.total_cmp(&bound).is_eq())
    {
        Some(bucket) => bucket.1 += count,
        None => buckets.push((bound, count)),
    }
}

/// The upper bound and the count of a line, after its opening brace.
fn bucket_of(line: &str) -> Option<(f64, f64)> {
    let (labels, count) = line.rsplit_once('}')?;
    let bound = labels.split("le=\"").last()?.split('"').next()?;
    let bound = if bound == "+Inf" {
        f64::INFINITY
    } else {
        bound.parse().ok()?
    };
    Some((bound, count.trim().parse().ok()?))
}

/// The latencies of a load in one histogram.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Latencies {
    pub histogram: &'static str,
    pub count: f64,
    pub p50_ms: f64,
    pub p90_ms: f64,
    pub p99_ms: f64,
}

impl Latencies {
    fn of(histogram: &'static str, buckets: &[(f64, f64)]) -> Self {
        Self {
            histogram,
            count: buckets.last().map_or(0.0, |(_, count)| *count),
            p50_ms: quantile(buckets, 0.5),
            p90_ms: quantile(buckets, 0.9),
            p99_ms: quantile(buckets, 0.99),
        }
    }

    /// Compares them with limits.
    pub fn checks(&self, limits: &Limits) -> Vec<Check> {
        [
            ("p50", self.p50_ms, limits.p50_ms),
            ("p90", self.p90_ms, limits.p90_ms),
            ("p99", self.p99_ms, limits.p99_ms),
        ]
        .into_iter()
        .map(|(name, measured, limit)| Check {
            what: format!("{name} of {}", self.histogram),
            measured,
            limit,
            unit: "ms",
            met: measured <= limit,
        })
        .collect()
    }
}

/// The quantile as Prometheus' `histogram_quantile` estimates it: linear within a bucket, and the last bound for values beyond it.
fn quantile(buckets: &[(f64, f64)], share: f64) -> f64 {
    let Some((_, total)) = buckets.last() else {
        return 0.0;
    };
    let rank = total * share;
    let (mut lower_bound, mut lower_count) = (0.0, 0.0);
    for (bound, count) in buckets {
        if *count >= rank && *count > lower_count {
            if bound.is_infinite() {
                return lower_bound;
            }
            let within = (rank - lower_count) / (count - lower_count);
            return lower_bound + (bound - lower_bound) * within;
        }
        if bound.is_finite() {
            (lower_bound, lower_count) = (*bound, *count);
        }
    }
    lower_bound
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = r#"
# HELP agent_sandbox_claim_startup_latency_ms End-to-end latency
agent_sandbox_claim_startup_latency_ms_bucket{launch_type="warm",sandbox_template="a",le="10"} 1
agent_sandbox_claim_startup_latency_ms_bucket{launch_type="warm",sandbox_template="a",le="20"} 1
agent_sandbox_claim_startup_latency_ms_bucket{launch_type="warm",sandbox_template="a",le="+Inf"} 1
"#;
    const AFTER: &str = r#"
agent_sandbox_claim_startup_latency_ms_bucket{launch_type="warm",sandbox_template="a",le="10"} 6
agent_sandbox_claim_startup_latency_ms_bucket{launch_type="warm",sandbox_template="a",le="20"} 10
agent_sandbox_claim_startup_latency_ms_bucket{launch_type="warm",sandbox_template="a",le="+Inf"} 10
agent_sandbox_claim_startup_latency_ms_bucket{launch_type="cold",sandbox_template="b",le="10"} 0
agent_sandbox_claim_startup_latency_ms_bucket{launch_type="cold",sandbox_template="b",le="20"} 0
agent_sandbox_claim_startup_latency_ms_bucket{launch_type="cold",sandbox_template="b",le="+Inf"} 1
agent_sandbox_claim_startup_latency_ms_sum{launch_type="cold",sandbox_template="b"} 99
agent_sandbox_claim_creation_total{namespace="x"} 7
"#;

    #[test]
    fn only_what_a_load_added_counts_over_all_labels() {
        let observed = Histograms::parse(AFTER).since(&Histograms::parse(BEFORE));
        assert_eq!(observed.len(), 1, "{observed:?}");
        let latencies = &observed[0];
        assert_eq!(
            latencies.histogram,
            "agent_sandbox_claim_startup_latency_ms"
        );
        assert!((latencies.count - 10.0).abs() < 1e-9);
        assert!((latencies.p50_ms - 10.0).abs() < 1e-9, "{latencies:?}");
        assert!((latencies.p90_ms - 20.0).abs() < 1e-9, "{latencies:?}");
        assert!(
            (latencies.p99_ms - 20.0).abs() < 1e-9,
            "the last bound: {latencies:?}"
        );
    }

    #[test]
    fn a_quantile_is_estimated_as_prometheus_does() {
        let buckets = [
            (10.0, 0.0),
            (20.0, 10.0),
            (40.0, 20.0),
            (f64::INFINITY, 20.0),
        ];
        for (share, expected) in [(0.25, 15.0), (0.5, 20.0), (0.75, 30.0), (1.0, 40.0)] {
            let found = quantile(&buckets, share);
            assert!((found - expected).abs() < 1e-9, "{share}: {found}");
        }
        assert!(quantile(&[], 0.5).abs() < 1e-9);
    }

    #[tokio::test]
    async fn metrics_are_read_over_http_and_errors_name_the_address() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let routes = axum::Router::new().route("/metrics", axum::routing::get(|| async { AFTER }));
        let server = tokio::spawn(async move { axum::serve(listener, routes).await });
        let read = Source::Address(url.clone()).read().await.unwrap();
        assert_eq!(Histograms::parse(&read), Histograms::parse(AFTER));
        let missing = Source::Address(format!("{url}/nothing")).read().await;
        assert!(format!("{:#}", missing.unwrap_err()).contains("404"));
        server.abort();
        let secure = Source::Address("https://example.com".to_owned())
            .read()
            .await;
        let error = format!("{:#}", secure.unwrap_err());
        assert!(error.contains("port-forward"), "{error}");
    }
}
