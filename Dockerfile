# Images of the controller, the router and the in-sandbox runtime: one static program each, on nothing, as an ordinary user.
#
#   docker build --target controller -t agent-sandbox-controller .
#   docker build --target router     -t agent-sandbox-router .
#   docker build --target sandboxd   -t sandboxd .

FROM rust:1-bookworm AS build
WORKDIR /source
COPY . .
# The repository is not copied: `--build-arg GIT_COMMIT=$(git rev-parse HEAD) --build-arg BUILD_DATE=$(git log -1 --format=%cI)`.
ARG GIT_COMMIT BUILD_DATE
ENV AGENT_SANDBOX_GIT_COMMIT=$GIT_COMMIT AGENT_SANDBOX_BUILD_DATE=$BUILD_DATE
# Static: nothing is found on `scratch` but what is copied there. Proc macros and build scripts are built for the builder itself, so
# the flags go by the target.
RUN RUSTFLAGS="-C target-feature=+crt-static" \
    cargo build --profile dist --locked --target "$(rustc -vV | sed -n 's/^host: //p')" --package agent-sandbox --package agent-sandbox-sandboxd \
 && mkdir -p /images/etc \
 && cp target/*/dist/agent-sandbox target/*/dist/sandboxd /images/ \
 && echo "nonroot:x:65532:65532:nonroot:/:/sbin/nologin" > /images/etc/passwd

FROM scratch AS base
COPY --from=build /images/etc/passwd /etc/passwd
USER 65532:65532

FROM base AS controller
COPY --from=build /images/agent-sandbox /agent-sandbox-controller
EXPOSE 8080 8081
ENTRYPOINT ["/agent-sandbox-controller"]

FROM base AS router
COPY --from=build /images/agent-sandbox /sandbox-router
EXPOSE 8080 8081 9090
ENTRYPOINT ["/sandbox-router"]

FROM base AS sandboxd
COPY --from=build /images/sandboxd /sandboxd
EXPOSE 8888
ENTRYPOINT ["/sandboxd"]
