"""The bash script that starts a run on every node, under Slurm or by hand: nodes, ranks and ports stay variables."""

from __future__ import annotations

import shlex

from planner.frameworks.writing import Launch, Target

RACK_DOMAIN = 16
"""Fast domains beyond this span several hosts: those of the NVL72 racks have four GPUs each (NVIDIA, GB200 NVL72 data sheet)."""
GPUS_OF_A_RACK_HOST = 4

NODE_RANK = "@NODE_RANK@"
"""Stands in the launcher's words for the rank that each node has."""

PREAMBLE = """\
set -euo pipefail # start it from its own folder: it names the files beside it

NUM_GPUS={num_gpus}
GPUS_PER_NODE=${{GPUS_PER_NODE:-{gpus_per_host}}} # of one host
NNODES=${{NNODES:-$((NUM_GPUS / GPUS_PER_NODE))}}
MASTER_PORT=${{MASTER_PORT:-29500}}
if [ -n "${{SLURM_JOB_ID:-}}" ]; then
    MASTER_ADDR=${{MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}}
elif [ "$NNODES" -gt 1 ]; then
    : "${{MASTER_ADDR:?address of the first node}}" "${{NODE_RANK:?number of this node, from 0}}"
fi
MASTER_ADDR=${{MASTER_ADDR:-localhost}}
"""

ON_EACH_NODE = f"""\
# Every node starts the same words with its own rank: Slurm's, or NODE_RANK where the script is started by hand on each node.
ON_EACH_NODE=(bash -c 'exec "${{@//{NODE_RANK}/${{SLURM_NODEID:-${{NODE_RANK:-0}}}}}}"' _)
if [ -n "${{SLURM_JOB_ID:-}}" ]; then
    ON_EACH_NODE=(srun --ntasks-per-node=1 "${{ON_EACH_NODE[@]}}")
fi
"""

LAUNCHERS: dict[str, tuple[str, ...]] = {
    "torchrun": (
        "torchrun",
        '--nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE"',
        f'--node-rank "{NODE_RANK}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"',
    ),
    "accelerate": (
        "accelerate launch",
        '--num_machines "$NNODES" --num_processes "$NUM_GPUS"',
        f'--machine_rank "{NODE_RANK}" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"',
    ),
}
"""Launcher -> its words, a line each."""


def gpus_per_host(target: Target) -> int:
    """GPUs of one host of the cluster."""
    domain = target.job.fast_domain
    return domain if domain <= RACK_DOMAIN else GPUS_OF_A_RACK_HOST


def comment(target: Target) -> str:
    """The head of a file as comment lines, for bash, TOML and YAML."""
    return "".join(f"# {line}".rstrip() + "\n" for line in target.head)


def launch_script(target: Target, launch: Launch) -> str:
    """The whole script."""
    hosts = -(-target.job.num_gpus // gpus_per_host(target))
    batch = f"#SBATCH --nodes={hosts}\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node={gpus_per_host(target)}\n#SBATCH --exclusive\n"
    exports = "".join(f"export {name}={value}\n" for name, value in launch.environment.items())
    arrays = "\n".join(array(name, lines) for name, lines in launch.arguments.items())
    command = [*LAUNCHERS[launch.launcher], *launch.launcher_arguments, launch.program]
    command += [f'"${{{name}[@]}}"' for name in launch.arguments]
    pieces = [
        f"#!/bin/bash\n{comment(target)}{batch}",
        PREAMBLE.format(num_gpus=target.job.num_gpus, gpus_per_host=gpus_per_host(target)),
        exports,
        arrays,
        ON_EACH_NODE + '\n"${ON_EACH_NODE[@]}" ' + " \\\n    ".join([*command, '"$@"']) + "\n",
    ]
    return "\n".join(piece for piece in pieces if piece)


def array(name: str, lines: tuple[str, ...]) -> str:
    """A bash array, a flag with its values per line.

    >>> print(array("A", ("--x 1", "--swiglu")), end="")
    A=(
        --x 1
        --swiglu
    )
    """
    return "".join([f"{name}=(\n", *(f"    {line}\n" for line in lines), ")\n"])


def quoted(value: object) -> str:
    """A value as one word of bash."""
    return shlex.quote(str(value))
