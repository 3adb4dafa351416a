#!/bin/sh
# Removes the conversion webhook from definitions of upstream's release 0.5, so that ours, which need none, can be applied:
# while the definitions name the webhook, the API server refuses definitions without it. Stop upstream's controller first, because it
# adds the webhook again; apply our definitions afterwards. Objects are stored in v1beta1 before and after, so none is rewritten.
set -eu

for kind in sandboxes.agents.x-k8s.io sandboxclaims.extensions.agents.x-k8s.io sandboxtemplates.extensions.agents.x-k8s.io \
    sandboxwarmpools.extensions.agents.x-k8s.io; do
    if [ "$(kubectl get crd "$kind" --ignore-not-found -o jsonpath='{.spec.conversion.strategy}')" = Webhook ]; then
        kubectl patch crd "$kind" --type=json --patch '[{"op":"replace","path":"/spec/conversion","value":{"strategy":"None"}}]'
    fi
done
