"""Three hundred claims at once on a pool that has a tenth of them warm: every one is met by a sandbox of its own, with a running pod."""

import os
import time

import cluster
from checks import check, kubectl, run_checks, until
from cluster import apply, claim, is_ready, items, pool, pool_is_full
from whole import no_pods, runtime_template

SPACE = "many"
CLAIMS = int(os.environ.get("CLAIMS", "300"))


@check
def all_are_met_and_none_shares():
    cluster.namespace(SPACE)
    # The probe of every second would cost more than the sandboxes.
    template = runtime_template("plain", SPACE)
    template["spec"]["podTemplate"]["spec"]["containers"][0].pop("readinessProbe")
    apply([template, pool("warm", SPACE, "plain", 30)])
    pool_is_full("warm", SPACE)
    names = {f"claim-{number}" for number in range(CLAIMS)}
    begin = time.monotonic()
    apply([claim(name, SPACE, warmPoolRef={"name": "warm"}) for name in sorted(names)])
    created = time.monotonic() - begin
    ready = set()

    def met():
        nonlocal ready
        ready = {one["metadata"]["name"] for one in items("sandboxclaims", SPACE) if is_ready(one)}
        return ready >= names

    for _ in range(5):
        try:
            until(met, "all claims to be met")
            break
        except AssertionError:
            print(f"        {len(ready)} of {CLAIMS} after {time.monotonic() - begin:.0f} s", flush=True)
    assert ready >= names, f"{len(ready)} of {CLAIMS}"
    print(f"        {CLAIMS} claims: accepted after {created:.1f} s, met after {time.monotonic() - begin:.1f} s", flush=True)
    holders = cluster.assert_exclusive(SPACE)
    assert set(holders.values()) >= names
    running = [pod for pod in items("pods", SPACE) if is_ready(pod)]
    assert len(running) >= CLAIMS, len(running)


@check
def all_of_it_goes():
    kubectl("delete", "sandboxwarmpool", "warm", "-n", SPACE)
    kubectl("delete", "sandboxclaims", "--all", "-n", SPACE, "--wait=false")
    for _ in range(5):
        try:
            no_pods(SPACE)
            break
        except AssertionError:
            print(f"        {len(items('pods', SPACE))} pods are left", flush=True)
    no_pods(SPACE)
    kubectl("delete", "namespace", SPACE, "--timeout=200s")


run_checks()
