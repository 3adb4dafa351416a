#!/bin/sh
# Prepares a cluster for definitions that serve only v1alpha1: makes it the storage version, rewrites every object, and removes
# v1beta1 from status.storedVersions. Stop the controller first; apply the older definitions and start the older
# controller afterwards. Sandboxes keep running meanwhile.
set -eu

# Which version the API server stores, in its own cipher.
stored() {
    kubectl get --raw "/apis/${1#*.}/v1alpha1" |
        tr '{' '\n' | grep "\"name\":\"${1%%.*}\"," | sed 's/.*"storageVersionHash":"\([^"]*\)".*/\1/'
}

kinds="sandboxes.agents.x-k8s.io
sandboxclaims.extensions.agents.x-k8s.io
sandboxtemplates.extensions.agents.x-k8s.io
sandboxwarmpools.extensions.agents.x-k8s.io"

# Only v1beta1 has claims that name a pool: with the older definitions they would be empty.
by_pool=$(kubectl get sandboxclaims.v1beta1.extensions.agents.x-k8s.io --all-namespaces \
    -o go-template='{{range .items}}{{if .spec.warmPoolRef}}{{.metadata.namespace}}/{{.metadata.name}} {{end}}{{end}}')
if [ -n "$by_pool" ]; then
    echo "These claims have a warmPoolRef, which the older definitions do not know: $by_pool" >&2
    echo "Delete them, or give them a sandboxTemplateRef in its place; nothing was changed." >&2
    exit 1
fi

for kind in $kinds; do
    current=$(kubectl get crd "$kind" -o go-template='{{range .spec.versions}}{{if .storage}}{{.name}}{{end}}{{end}}')
    if [ "$current" != v1alpha1 ]; then
        before=$(stored "$kind")
        versions=$(kubectl get crd "$kind" -o go-template='{{range .spec.versions}}{{.name}} {{end}}')
        patch=
        index=0
        for version in $versions; do
            if [ "$version" = v1alpha1 ]; then storage=true; else storage=false; fi
            patch="$patch${patch:+,}{\"op\":\"replace\",\"path\":\"/spec/versions/$index/storage\",\"value\":$storage}"
            index=$((index + 1))
        done
        kubectl patch crd "$kind" --type=json --patch "[$patch]"
        until [ "$(stored "$kind")" != "$before" ]; do sleep 1; done
    fi
    # An empty patch still writes the object, because the storage version has changed.
    versioned="${kind%%.*}.v1alpha1.${kind#*.}"
    kubectl get "$versioned" --all-namespaces -o go-template='{{range .items}}{{.metadata.namespace}} {{.metadata.name}}
{{end}}' | xargs -r -n 2 -P 8 sh -c 'kubectl patch "$0" "$2" --namespace "$1" --type=merge --patch "{}"' "$versioned"
    kubectl patch crd "$kind" --subresource=status --type=merge --patch '{"status":{"storedVersions":["v1alpha1"]}}'
done
