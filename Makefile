# Shorthand for contributors with kind or minikube; everything else is cargo and `cargo xtask`.
.PHONY: deploy-kind delete-kind deploy-minikube delete-minikube

# EXTENSIONS=true, CONTROLLER_ARGS="--flag …", CLUSTER=name and DIST=directory are passed on; CONTROLLER_ARGS must not set --extensions.
deploy-kind:
	deploy/local-cluster kind

delete-kind:
	kind delete cluster --name "$${CLUSTER:-agent-sandbox}"

deploy-minikube:
	deploy/local-cluster minikube

delete-minikube:
	minikube delete --profile "$${CLUSTER:-agent-sandbox}"
