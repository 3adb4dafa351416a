//! The writes that an API server has counted in its metrics, which kube-apiserver and the embedded server name alike.

use std::collections::BTreeMap;

use kube::Client;

const SERIES: &str = "apiserver_request_total{";
/// Resources that other components write, independent of claims.
const OTHER_COMPONENTS: [&str; 6] = [
    "endpoints",
    "endpointslices",
    "leases",
    "nodes",
    "subjectaccessreviews",
    "tokenreviews",
];

/// The number of writes of each sort, such as `PATCH sandboxclaims/status`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Writes(BTreeMap<String, u64>);

impl Writes {
    /// Reads the counts so far.
    pub async fn so_far(client: &Client) -> Result<Self, kube::Error> {
        let metrics = http::Request::get("/metrics")
            .body(Vec::new())
            .expect("the request is well formed");
        let text = client.request_text(metrics).await?;
        Ok(Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let mut counts = BTreeMap::new();
        for line in text.lines() {
            let Some((labels, count)) = line
                .strip_prefix(SERIES)
                .and_then(|rest| rest.rsplit_once("} "))
            else {
                continue;
            };
            let label = |name: &str| {
                labels.split(',').find_map(|label| {
                    let (key, value) = label.split_once('=')?;
                    (key == name).then(|| value.trim_matches('"'))
                })
            };
            let verb = label("verb").unwrap_or_default();
            if matches!(verb, "GET" | "LIST" | "WATCH" | "") {
                continue;
            }
            let resource = label("resource").unwrap_or_default();
            let name = match label("subresource").unwrap_or_default() {
                "" => format!("{verb} {resource}"),
                subresource => format!("{verb} {resource}/{subresource}"),
            };
            *counts.entry(name).or_default() += count.trim().parse().unwrap_or(0);
        }
        Self(counts)
    }

    /// The writes since an earlier count.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let counts = self.0.iter().map(|(name, count)| {
            let before = earlier.0.get(name).copied().unwrap_or(0);
            (name.clone(), count.saturating_sub(before))
        });
        Self(counts.filter(|(_, count)| *count > 0).collect())
    }

    /// The number of writes of this sort.
    pub fn of(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(name, count)| (name.as_str(), *count))
    }

    /// The writes beyond the most that this number of warm claims may cause.
    ///
    /// A claim causes three writes on the critical path (bind the claim, transfer the sandbox, publish the claim's status) and later the
    /// pod's metadata, the sandbox's status and one event. A sandbox that a pool creates meanwhile has two status writes (created, Ready)
    /// and one event; its pod is created, perhaps bound, and has up to two status writes; the pool's status changes up to three times.
    /// Every other write is excess.
    pub fn excess(&self, claims: u64) -> Vec<String> {
        let refills = self.of("POST sandboxes");
        let allowed = |name: &str| match name {
            "POST sandboxclaims"
            | "PATCH sandboxclaims"
            | "PATCH sandboxes"
            | "PATCH sandboxclaims/status"
            | "PATCH pods"
            | "POST sandboxes" => claims,
            "PATCH sandboxes/status" => claims + 2 * refills,
            "POST events" => claims + refills,
            "POST pods" | "POST pods/binding" => refills,
            "PATCH pods/status" => 2 * refills,
            "APPLY sandboxwarmpools/status" | "PATCH sandboxwarmpools/status" => {
                claims + 2 * refills
            }
            _ => 0,
        };
        self.iter()
            .filter(|(name, count)| !is_of_other_component(name) && *count > allowed(name))
            .map(|(name, count)| {
                format!(
                    "{count} requests {name} for {claims} claims and {refills} refills, {} expected at most",
                    allowed(name)
                )
            })
            .collect()
    }
}

fn is_of_other_component(name: &str) -> bool {
    let resource = name.split_once(' ').map_or(name, |(_, resource)| resource);
    let resource = resource.split('/').next().unwrap_or_default();
    OTHER_COMPONENTS.contains(&resource)
}

#[cfg(test)]
mod tests {
    use super::*;

    const METRICS: &str = r#"
# TYPE apiserver_request_total counter
apiserver_request_total{code="200",component="apiserver",dry_run="",group="extensions.agents.x-k8s.io",resource="sandboxclaims",scope="resource",subresource="status",verb="PATCH",version="v1beta1"} 3
apiserver_request_total{code="409",component="apiserver",dry_run="",group="extensions.agents.x-k8s.io",resource="sandboxclaims",scope="resource",subresource="status",verb="PATCH",version="v1beta1"} 1
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 9
apiserver_request_total{code="201",component="apiserver",dry_run="",group="agents.x-k8s.io",resource="sandboxes",scope="resource",subresource="",verb="POST",version="v1beta1"} 1
other_total{verb="PATCH"} 7
"#;

    #[test]
    fn writes_are_counted_whatever_their_outcome_and_reads_are_not() {
        let writes = Writes::parse(METRICS);
        let counted: Vec<_> = writes.iter().collect();
        assert_eq!(
            counted,
            [("PATCH sandboxclaims/status", 4), ("POST sandboxes", 1)]
        );
        assert_eq!(writes.since(&writes), Writes::default());
    }

    #[test]
    fn writes_beyond_the_allowed_ones_are_reported() {
        let writes = Writes::parse(METRICS);
        assert_eq!(writes.excess(4), Vec::<String>::new());
        let excess = writes.excess(3);
        assert_eq!(excess.len(), 1);
        assert!(
            excess[0].contains("PATCH sandboxclaims/status"),
            "{excess:?}"
        );
    }

    #[test]
    fn a_write_that_claims_do_not_need_is_excess() {
        let count = |resource: &str, subresource: &str, verb: &str, count: u32| {
            let labels = format!(
                r#"resource="{resource}",subresource="{subresource}",verb="{verb}",version="v1""#
            );
            Writes::parse(&format!("{SERIES}{labels}}} {count}"))
        };
        for (writes, is_excess) in [
            (count("sandboxes", "", "PUT", 1), true),
            (count("sandboxes", "", "DELETE", 1), true),
            (count("services", "", "POST", 1), true),
            (count("sandboxwarmpools", "status", "APPLY", 10), false),
            (count("sandboxwarmpools", "status", "APPLY", 11), true),
            (count("leases", "", "PUT", 50), false),
            (count("nodes", "status", "PATCH", 50), false),
        ] {
            let excess = writes.excess(10);
            assert_eq!(!excess.is_empty(), is_excess, "{writes:?}: {excess:?}");
        }
    }
}
