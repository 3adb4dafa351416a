#!/usr/bin/env bash
# Makes the namespaces in which `cargo xtask test-cluster` runs a whole cluster. Ending the process that this becomes ends the cluster.
#
#   namespaces.sh outside CGROUP DIRECTORY COMMAND…   joins CGROUP in every hierarchy, then unshares and runs the second stage
#   namespaces.sh inside DIRECTORY COMMAND…           mounts what a kubelet expects, makes the network, executes COMMAND as PID 1
set -euo pipefail
stage=$1
shift

# Prints the hierarchies of cgroups as "DIRECTORY OPTIONS", for version 1; version 2 is "unified".
hierarchies() {
  awk -F: '$2 == "" { print "unified"; next }
           $2 ~ /^name=/ { sub(/^name=/, "", $2); print $2, "none,name=" $2; next }
           { print $2, $2 }' /proc/self/cgroup
}

outside() {
  local cgroup=$1 directory=$2 name options
  shift 2
  while read -r name options; do
    echo $$ >"/sys/fs/cgroup/$name/$cgroup/cgroup.procs"
  done < <(hierarchies)
  exec unshare --cgroup --net --mount --pid --ipc --uts --fork --kill-child -- bash "$0" inside "$directory" "$@"
}

mount_cgroups() {
  local name options
  # Read before /sys/fs/cgroup is replaced; the root of each is the cgroup that the first stage joined.
  mapfile -t found < <(hierarchies)
  umount -R /sys
  mount -t sysfs sysfs /sys
  mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
  for line in "${found[@]}"; do
    read -r name options <<<"$line"
    mkdir "/sys/fs/cgroup/$name"
    if [ "$name" = unified ]; then
      mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
    else
      mount -t cgroup -o "$options" cgroup "/sys/fs/cgroup/$name"
    fi
  done
}

# A kubelet sets these for the whole machine. Here it reads and writes files of this mount namespace, and the machine keeps its own values.
shadow_sysctl() {
  local file=/run/sysctl/${1//\//.}
  echo "$2" >"$file"
  mount --bind "$file" "/proc/sys/$1"
}

make_network() {
  ip link set lo up
  # The far end of the link has the address of the default gateway and, to test that pods cannot reach it, that of a cloud's metadata service.
  ip link add eth0 type veth peer name uplink0
  ip address add 10.99.0.1/32 dev uplink0
  ip address add 169.254.169.254/32 dev uplink0
  ip address add 10.99.0.2/24 dev eth0
  ip link set eth0 up
  ip link set uplink0 up
  ip route add default via 10.99.0.1 dev eth0
  echo 1 >/proc/sys/net/ipv4/ip_forward
  echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables
}

inside() {
  local directory=$1 layer point
  shift
  mount --make-rprivate /
  # Root filesystems of other programs' containers would be held for as long as this namespace lives.
  awk '{ for (i = 7; i < NF; i++) if ($i == "-" && ($(i + 1) == "overlay" || $(i + 1) == "nsfs")) print $5 }' /proc/self/mountinfo |
    tac | while read -r point; do umount -l "$point" || true; done
  mount --make-rshared /
  mount -t proc proc /proc
  hostname node-one
  mount_cgroups
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir -p /run/lock /run/sysctl /run/netns
  # What the programs write to fixed places (/var/lib/kubelet, /var/lib/cni, /opt/containerd) goes to the directory of this run.
  for layer in var opt etc; do
    mkdir -p "$directory/layers/$layer/upper" "$directory/layers/$layer/work"
    mount -t overlay -o "lowerdir=/$layer,upperdir=$directory/layers/$layer/upper,workdir=$directory/layers/$layer/work" overlay "/$layer"
  done
  shadow_sysctl vm/overcommit_memory 1
  shadow_sysctl vm/panic_on_oom 0
  shadow_sysctl kernel/panic 10
  shadow_sysctl kernel/panic_on_oops 1
  shadow_sysctl kernel/keys/root_maxkeys 1000000
  shadow_sysctl kernel/keys/root_maxbytes 25000000
  # The kernel lets a user namespace mount /proc only if one is visible that nothing is mounted on. `agent-sandbox node` needs that.
  mkdir /run/proc
  mount -t proc proc /run/proc
  make_network
  exec "$@"
}

"$stage" "$@"
