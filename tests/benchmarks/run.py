"""Measures the search: layouts per second and core, and how time and memory grow with the cluster.

Run from the project's root: ``python -m tests.benchmarks.run``. Writes results/benchmarks.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from planner import spec
from planner.cost.arrays import PIECE
from planner.cost.estimate import memory_of, time_of
from planner.errors import NoLayoutFits
from planner.explain import complete_layout
from planner.refine import refined
from planner.refinement import bounds, can_split
from planner.report.write import write_atomically
from planner.request import Request, make_scenario
from planner.robustness import robustness_of
from planner.scenario import Scenario
from planner.search import enumerate_layouts, estimate, search
from planner.split import even_layers, pipeline_of
from planner.why import binding, why
from solver import partition, prune, space

RESULT = Path(__file__).resolve().parents[2] / "results" / "benchmarks.md"
GROWTH = (8, 64, 512, 2048, 4096, 16384, 65536, 131072)


def seconds(job: object, repeats: int = 3) -> float:
    """The shortest of a few runs."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        job()  # type: ignore[operator]
        times.append(time.process_time() - started)
    return min(times)


def rates(scenario: Scenario) -> dict[str, float]:
    """Rows per CPU second of each stage of the search, on one core."""
    problem = spec.problem(scenario)
    spread = enumerate_layouts(problem)
    pieces = list(spread.pieces(PIECE))
    total = sum(len(piece) for piece in pieces)
    job = scenario.job
    found = {
        "meshes and splits by CP-SAT": (len(space.meshes(problem)) + len(space.splits(problem)))
        / seconds(lambda: (space.meshes(problem), space.splits(problem))),
        "layouts counted (all rules)": problem.space_size / seconds(lambda: prune.count(problem)),
        "layouts spread": total / seconds(lambda: list(spread.pieces(PIECE))),
        "layouts scored for memory": total / seconds(lambda: [memory_of(job, piece) for piece in pieces]),
        "layouts scored for step time": total / seconds(lambda: [time_of(job, piece) for piece in pieces]),
        "layouts through legality, memory, verdict, time": total / seconds(lambda: [list(estimate(scenario, piece)) for piece in pieces]),
    }
    return found


PIPELINES = (
    ("405B, 126 layers over 4", "405b", "h100", 4096, "tp8-pp4-dp128-zero1-mb1-full"),
    ("405B, 126 layers over 16", "405b", "h100", 4096, "tp8-pp16-dp32-zero1-mb1-full"),
    ("405B, 126 layers over 64", "405b", "h100", 4096, "tp1-pp64-dp64-zero1-mb1-full"),
    ("DeepSeek-V3, 3 + 58 layers and one predicting over 16", "deepseek-v3", "h800", 2048, "pp16-ep16-dp128-zero1-mb1-full3"),
    ("Qwen3-235B, 94 layers over 8 x 4 chunks", "qwen3-235b-a22b", "h100", 512, "tp2-pp8-vp4-ep16-dp32-zero1-mb1"),
)


def splits() -> list[str]:
    """Rows of the table of uneven splits: the solver's problem, its solution, its status."""
    rows = []
    for name, model, gpu, num_gpus, label in PIPELINES:
        scenario = make_scenario(Request(model=model, gpu=gpu, num_gpus=num_gpus))
        job, layout = scenario.job_in("megatron"), complete_layout(scenario, label)
        pipeline, even = pipeline_of(job, layout), even_layers(job, layout)
        built = seconds(lambda: pipeline_of(job, layout))  # noqa: B023
        solved = seconds(lambda: partition.solve(pipeline, hint=even))  # noqa: B023
        status = partition.solve(pipeline, hint=even).status
        rows.append(f"| {name} | {sum(map(len, pipeline.options)):,} | {built:.3f} | {solved:.3f} | {status} |")
    return rows


QUESTIONS = (
    ("70B on 2,048 H100", Request(model="70b", num_gpus=2048)),
    ("405B on 16,384 H100", Request(model="405b", num_gpus=16384, global_batch_size=4096)),
    ("Mixtral 8x22B on 256 H100", Request(model="mixtral-8x22b", num_gpus=256)),
)


def answers() -> list[str]:
    """Rows of the table of what follows a search: bounds, refinement, draws, binding limits."""
    rows = []
    for name, request in QUESTIONS:
        scenario = make_scenario(request)
        result = search(scenario)
        found = refined(result, 20)
        assert found.proof is not None
        parts = (
            seconds(lambda: bounds(scenario, result.ranked, can_split(result.ranked))),  # noqa: B023
            seconds(lambda: refined(result, 20)),  # noqa: B023
            seconds(lambda: robustness_of(result, found)),  # noqa: B023
            seconds(lambda: binding(result), 1),  # noqa: B023
        )
        timed = " | ".join(f"{part:.2f}" for part in parts)
        rows.append(f"| {name} | {len(result.ranked):,} | {timed} | {found.proof.split} | {found.proof.open} |")
    return rows


INFEASIBLE = (
    ("405B on 8 H100", Request(model="405b", num_gpus=8)),
    ("70B on 16 A100 of 40 GB without recompute", Request(model="70b", num_gpus=16, gpu="a100-sxm-40gb", recompute=("none",))),
)


def diagnoses() -> list[str]:
    """Rows of the table of questions without an answer: the conflict's size, the repairs, the seconds."""
    rows = []
    for name, request in INFEASIBLE:
        scenario = make_scenario(request)
        found = why(scenario)
        rows.append(f"| {name} | {len(found.conflict)} | {len(found.repairs)} | {seconds(lambda: why(scenario), 1):.1f} |")  # noqa: B023
    return rows


def child(num_gpus: int) -> None:
    """One search in a process of its own: prints layouts, seconds, peak MiB."""
    scenario = make_scenario(Request(model="70b", num_gpus=num_gpus, global_batch_size=max(1024, num_gpus // 8)))
    started = time.perf_counter()
    try:
        ranked = len(search(scenario).ranked)
    except NoLayoutFits:
        ranked = 0
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    print(f"{ranked} {time.perf_counter() - started:.2f} {peak:.0f}")


def growth() -> list[str]:
    """Rows of the growth table."""
    rows = []
    for num_gpus in GROWTH:
        started = time.perf_counter()
        code = f"from tests.benchmarks.run import child; child({num_gpus})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        ranked, inside, peak = done.stdout.split()
        rows.append(f"| {num_gpus:,} | {int(ranked):,} | {inside} | {time.perf_counter() - started:.2f} | {peak} |")
    return rows


SWEEPS = (
    ("one small point (start-up)", ("--model", "llama-3.2-1b", "--gpus", "1", "--global-batch", "1")),
    ("70B, 64 to 16,384 GPUs doubling: 9 points", ("--model", "70b", "--gpus", "64:16384:x2")),
    ("70B, 32 of the multiples of 8 up to 4,096", ("--model", "70b", "--gpus", "128:4096:+128")),
    ("70B, 128 of them", ("--model", "70b", "--gpus", "32:4096:+32")),
    ("70B, all 512", ("--model", "70b", "--gpus", "8:4096:+8")),
)


def sweep_seconds(arguments: tuple[str, ...], jobs: int) -> tuple[float, float]:
    """Wall seconds of a sweep, and MiB of the process that takes most: it or a worker."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "planner.cli", "sweep", *arguments, "--jobs", str(jobs), "--csv", f"{folder}/out.csv"]
        measure = (
            "import resource, subprocess, sys, time; start = time.perf_counter(); "
            "subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True); "
            "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)"
        )
        done = subprocess.run([sys.executable, "-c", measure, *command], capture_output=True, text=True, check=True)
    wall, peak = done.stdout.split()
    return float(wall), float(peak)


def sweeps() -> list[str]:
    """Rows of the table of sweeps: one worker against two, the share of starting up, the memory."""
    rows, start_up = [], (0.0, 0.0)
    for number, (name, arguments) in enumerate(SWEEPS):
        (one, _), (two, peak) = (sweep_seconds(arguments, jobs) for jobs in (1, 2))
        start_up = (one, two) if number == 0 else start_up
        rows.append(
            f"| {name} | {one:.1f} | {two:.1f} | {one / two:.2f} | {start_up[0] / one:.0%} | {start_up[1] / two:.0%} | {peak:.0f} |"
        )
    return rows


def main() -> None:
    """Measure and write the page."""
    lines = ["# Benchmarks", "", "Generated by `python -m tests.benchmarks.run`, CPU seconds on one core.", ""]
    for name, request in (
        ("70B on 2,048 H100", Request(model="70b", num_gpus=2048)),
        ("DeepSeek-V3 on 2,048 H800", Request(model="deepseek-v3", num_gpus=2048, gpu="h800")),
    ):
        lines += [f"## {name}", "", "| stage | per second and core |", "|---|---|"]
        lines += [f"| {stage} | {rate:,.0f} |" for stage, rate in rates(make_scenario(request)).items()]
        lines.append("")
    lines += ["## Growth with the cluster (70B, 8 to 131,072 GPUs; one process each)", ""]
    lines += ["| GPUs | layouts ranked | search, s | with start-up, s | peak memory, MiB |", "|---|---|---|---|---|", *growth()]
    lines += ["", "## The best uneven split of one layout (a second or less, proven)", ""]
    lines += ["| pipeline | loads offered | build, s | solve, s | status |", "|---|---|---|---|---|", *splits()]
    lines += ["", "## After the search: seconds for bounds on all layouts, a refined shortlist of 20, 1,000 draws, binding limits", ""]
    lines += [
        "| question | ranked | bounds | refined | draws | limits | splits sought | left open |",
        "|---|---|---|---|---|---|---|---|",
        *answers(),
    ]
    lines += ["", "## Sweeps: wall seconds of the whole command", ""]
    heads = ("sweep", "1 worker", "2 workers", "speed-up", "start-up of 1", "start-up of 2", "peak MiB of a process")
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *sweeps()]
    lines += ["", "## Why nothing fits", "", "| question | limits in conflict | repairs | s |", "|---|---|---|---|", *diagnoses()]
    write_atomically(RESULT, ["\n".join(lines) + "\n"])
    print("\n".join(lines))


if __name__ == "__main__":
    main()
