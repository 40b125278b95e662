"""A launch script gives the words that bash would pass; bash itself is the oracle. Nothing of a script is run by the reader."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.frameworks.files import open_source
from planner.frameworks.shell import Script, read_script


def script(folder: Path, text: str) -> Script:
    """The script of a text."""
    path = folder / "launch.sh"
    path.write_text(text)
    return read_script(open_source(path))


def words_of_bash(folder: Path, text: str) -> list[str]:
    """What bash passes to the program: torchrun stands for a program that prints its words."""
    (folder / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" torchrun "$@"\n')
    (folder / "torchrun").chmod(0o755)
    (folder / "bash.sh").write_text(text)
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(["bash", "bash.sh"], cwd=folder, env=path, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


SCRIPTS = {
    "arrays": 'A=(\n  --x 1 # one\n  --y "a b"\n)\nB=(--z 3)\ntorchrun p.py "${A[@]}" ${B[@]}\n',
    "growing arrays": "A=(--x 1)\nA+=(--y 2)\ntorchrun p.py ${A[@]}\n",
    "strings over lines": 'A="--x 1 \\\n   --y 2"\ntorchrun p.py $A \\\n  --z 3\n',
    "text over lines": 'A="\n  --x 1\n  --y 2\n"\ntorchrun p.py $A\n',
    "defaults": "torchrun p.py --x ${X:-7} --y ${Y-8}\nX=1\n",
    "numbers": "N=4\nG=8\nW=$(($N*G))\nH=$((W / 2 + 1))\ntorchrun p.py --x $W --y ${H}\n",
    "growing strings": 'A="--x 1"\nA+=" --y 2"\nA="$A --z 3"\ntorchrun p.py $A\n',
    "quotes": 'torchrun p.py --x \'a $B "c"\' --y "d \'e\'" --z "f\\"g"\n',
    "pipes": "torchrun p.py --x 1 2>&1 | cat\n",
    "environment": "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun p.py --x 1\n",
    "layouts": 'L="Et*3|(tt|)*29,m|L"\ntorchrun p.py --pipeline-model-parallel-layout "$L"\n',
    "comments": 'A=1 # the "first\n# torchrun q.py --x 9\ntorchrun p.py --x $A --y a#b # tail\n',
    "the caller's words": 'A=(--x 1)\ntorchrun p.py "${A[@]}" "$@"\n',
    "branches": 'S=7b\nif [ $S = "7b" ]; then\n L=32\nelif [ $S = 13b ]; then\n L=40\nelse\n L=80\nfi\ntorchrun p.py --x $L\n',
    "a branch on one line": "S=1\nif [ $S -eq 0 ]; then A=1; else A=2; fi\ntorchrun p.py --x $A\n",
    "nested branches": 'S=1\nA=0\nif [ $S -eq 0 ]; then\n if [ $S -eq 0 ]; then A=1; fi\nfi\nif [[ $S -gt 0 ]]; then A="$A 3"; fi\n'
    "torchrun p.py $A\n",
    "tests before a word": 'A=0\n[ 4 -gt 16 ] && A=1\n[ 4 -lt 16 ] && B=2\n[ -z "$C" ] || C=3\nC=4\ntorchrun p.py --x "$A" --y $B --z $C\n',
    "several on a line": "A=1; B=2\nC=3 D=4\ncd . && torchrun p.py --x $A $B $C $D\n",
    "exports": "export N=3\nexport M=$N\ntorchrun p.py --x ${M}\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_words_are_those_of_bash(tmp_path: Path, name: str) -> None:
    assert list(script(tmp_path, SCRIPTS[name]).words) == words_of_bash(tmp_path, SCRIPTS[name])


def test_what_only_the_shell_knows_is_told(tmp_path: Path) -> None:
    found = script(tmp_path, 'D=$(date +%s)\ntorchrun --node_rank $NODE_RANK p.py --save $D --data "$1" --gpus $(nvidia-smi -L | wc -l)\n')
    assert set(found.unknown) == {"$(date +%s)", "$NODE_RANK", "$1", "$(nvidia-smi -L | wc -l)"}
    assert found.words[:4] == ("torchrun", "--node_rank", "$NODE_RANK", "p.py")


def test_a_condition_that_only_the_shell_can_decide_is_told_and_its_branch_taken(tmp_path: Path) -> None:
    found = script(tmp_path, 'if [ -n "$SLURM_JOB_ID" ]; then\n A=1\nelse\n A=2\nfi\ntorchrun p.py --x $A\n')
    assert found.words[-1] == "1" and any("SLURM_JOB_ID" in note for note in found.notes)


def test_a_pipe_inside_a_substitution_cuts_nothing(tmp_path: Path) -> None:
    text = "M=$(scontrol show hostnames $N | head -n 1)\ntorchrun --master_addr $M --node `hostname | cut -c1` p.py --x 1\n"
    assert script(tmp_path, text).words[-3:] == ("p.py", "--x", "1")


def test_nothing_is_run(tmp_path: Path) -> None:
    made = tmp_path / "made"
    script(tmp_path, f"touch {made}\nA=$(touch {made})\n`touch {made}`\ntorchrun p.py --x $A $(touch {made}) `touch {made}`\n")
    assert not made.exists()


def test_the_environment_of_the_command_is_known(tmp_path: Path) -> None:
    found = script(tmp_path, "export CUDA_DEVICE_MAX_CONNECTIONS=1\nA=2\nNCCL_DEBUG=INFO torchrun p.py\n")
    assert found.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        ("echo hello\n", "no command that launches"),
        ('torchrun p.py --x "a\n', "a quote is not closed"),
        ("A=x\n" + "A=$A$A$A$A\n" * 30 + "torchrun p.py $A\n", "unfolds without end"),
        ("torchrun p.py " + "$((" * 30_000, "unfold without end"),
        ("x" * 300_000, "not a launch script"),
    ],
)
def test_a_broken_script_is_one_line(tmp_path: Path, text: str, telling: str) -> None:
    with pytest.raises(InputError, match=telling) as caught:
        script(tmp_path, text)
    assert "\n" not in str(caught.value)
