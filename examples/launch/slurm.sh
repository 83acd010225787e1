#!/usr/bin/env bash
# Train on the nodes of a SLURM job. From the checkout, with the environment active:
#
#   sbatch examples/launch/slurm.sh SETTINGS.toml [--section.name=value ...]
#
# The first node runs the Ray head and the trainer. The settings place engines and ranks on the nodes.
#SBATCH --job-name=rl-async-trainer
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --no-kill
#SBATCH --requeue
set -euo pipefail

launch=examples/launch
if [[ ! -f $launch/ray_node.sh ]]; then
    echo "slurm.sh must be submitted from the checkout, where $launch/ray_node.sh exists; found $PWD." \
        "Run \`cd CHECKOUT\`, then \`sbatch $launch/slurm.sh SETTINGS.toml\`." >&2
    exit 2
fi
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address=$(getent ahostsv4 "${hosts[0]}" | awk 'NR == 1 {print $1}')
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_HEAD=$address:$port RAY_AUTH_TOKEN RAY_AUTH_MODE=token

# One task on each node, with all its CPUs. A lost node does not end the others.
step=(srun --ntasks-per-node=1 --cpu-bind=none --no-kill --kill-on-bad-exit=0)
"${step[@]}" --nodes=1 --nodelist="${hosts[0]}" bash "$launch/ray_node.sh" head &
nodes=($!)
if ((${#hosts[@]} > 1)); then
    "${step[@]}" --nodes=$((${#hosts[@]} - 1)) --exclude="${hosts[0]}" bash "$launch/ray_node.sh" worker &
    nodes+=($!)
fi
trap 'kill "${nodes[@]}"; wait' EXIT

python "$launch/wait_for_nodes.py" "$RAY_HEAD" "${#hosts[@]}"
rl-async-trainer train "$@" --cluster.ray_address="$RAY_HEAD" --run.if_exists=resume &
trainer=$!
trap 'kill -TERM $trainer' TERM # 600 s before the time limit; the trainer then saves a checkpoint
wait $trainer || wait $trainer  # a signal interrupts the first one
