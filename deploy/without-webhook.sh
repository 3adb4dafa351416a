#!/bin/sh
# Prepares definitions that are converted by a webhook, as those of release 0.5 of the other implementation are, for ours, which need none:
# while the webhook is named, the API server refuses to do without it. Stop that controller first, because it names the webhook again;
# apply our definitions afterwards. Objects are stored in v1beta1 before and after, so none has to be written anew.
set -eu

for kind in sandboxes.agents.x-k8s.io sandboxclaims.extensions.agents.x-k8s.io sandboxtemplates.extensions.agents.x-k8s.io \
    sandboxwarmpools.extensions.agents.x-k8s.io; do
    if [ "$(kubectl get crd "$kind" --ignore-not-found -o jsonpath='{.spec.conversion.strategy}')" = Webhook ]; then
        kubectl patch crd "$kind" --type=json --patch '[{"op":"replace","path":"/spec/conversion","value":{"strategy":"None"}}]'
    fi
done
