#!/usr/bin/env bash
# Run one Ray node until SIGTERM: `ray_node.sh head` or `ray_node.sh worker`, with these variables.
#
#   RAY_HEAD          IP:PORT of the head
#   RAY_AUTH_TOKEN    the token of the cluster, the same on every node
#   RAY_NODE_ADDRESS  optional: the IP of this node, if the route to the head is not the network to use
#   RAY_NODE_OPTIONS  optional: more options of `ray start`, such as --object-store-memory=20000000000
#
# Ray is started again whenever it ends. A worker keeps trying until the head answers, and a worker that lost its Ray
# joins again. A trainer ends when the head is lost.
set -euo pipefail

port=${RAY_HEAD##*:}
: "${RAY_AUTH_TOKEN:?must be the same secret on every node}"
case ${1:-} in
head)
    free=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
    place=(--head --port="$port" --include-dashboard=false --ray-client-server-port="$free")
    address=${RAY_NODE_ADDRESS:-${RAY_HEAD%:*}}
    ;;
worker) place=(--address="$RAY_HEAD") address=${RAY_NODE_ADDRESS:-} ;;
*)
    echo "usage: ray_node.sh head|worker; found ${1:-nothing}" >&2
    exit 2
    ;;
esac
if [[ -n $address ]]; then
    place+=(--node-ip-address="$address")
fi
read -ra more <<<"${RAY_NODE_OPTIONS:-}"

export RAY_AUTH_MODE=token RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # nothing to drain: the trainer ends first
# Notice a lost node within 5 s. Ray's default is 15 s.
export RAY_health_check_initial_delay_ms=0 RAY_health_check_period_ms=1000
export RAY_health_check_timeout_ms=1000 RAY_health_check_failure_threshold=3
# Every user can read Ray's folder, so it is inside a private one. The path is short, because it has sockets.
folder=$(mktemp -d /tmp/rl-node-XXXXXX)
# The system chooses every port except the head's, so several nodes can share a machine.
ports=(--min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0)

finish() {
    trap - TERM INT EXIT
    kill %% 2>/dev/null && wait
    rm -rf "$folder"
}
trap 'finish; exit' TERM INT
trap finish EXIT
while true; do
    # In the background, because bash delays traps while a foreground command runs.
    ray start --block --disable-usage-stats --temp-dir="$folder/ray" "${ports[@]}" "${place[@]}" "${more[@]}" &
    wait $! || true
    echo "ray_node.sh: the Ray $1 on $(hostname) ended; starting it again" >&2
    sleep 2
done
