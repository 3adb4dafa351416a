# Shorthand for contributors with kind and a container engine; everything else is cargo and `cargo xtask`.
.PHONY: deploy-kind delete-kind

# EXTENSIONS=true and CONTROLLER_ARGS="--flag …" are passed on; CONTROLLER_ARGS must not set --extensions.
deploy-kind:
	deploy/kind/deploy

delete-kind:
	kind delete cluster --name agent-sandbox
