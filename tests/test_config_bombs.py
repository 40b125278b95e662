"""Files that are no configurations, and such as would take for ever: each is refused in one line or read, soon and in little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.errors import InputError
from planner.frameworks import files
from tests.good_configs import FOLDER, GOOD, check_message, judged
from tests.test_broken_configs import WRONG, changed, leaves


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


YAML_TAGS = ("int", "float", "bool", "null", "timestamp", "binary", "set", "omap", "pairs", "str", "seq", "map", "value", "merge", "x")
ENDINGS = (".sh", ".yaml", ".yml", ".toml", ".json", ".log", ".txt", "")
CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "spaces": b" \n\t\n ",
    "a byte-order mark": b"\xef\xbb\xbf",
    "utf-16": "num_layers: 4".encode("utf-16"),
    "latin-1": "description: café\n".encode("latin-1"),
    "a picture": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)),
    "half a letter": "num_layers: 4 # é".encode()[:-1],
    "a number": b"7",
    "a list": b"[1, 2, 3]",
    "null": b"null",
    "a shebang": b"#!/bin/bash\n",
    "only a comment": b"# num_layers: 4\n",
    "a python tag": b"!!python/object/apply:os.system ['touch hacked']\n",
    "two documents": b"num_layers: 4\n---\nnum_layers: 5\n",
    "a lone surrogate": b'{"train_batch_size": "\\ud800", "zero_optimization": {"stage": "\\udfff"}}',
    "a key twice": b'{"train_batch_size": 1, "train_batch_size": 2, "zero_optimization": {}, "zero_optimization": []}',
    "a date": b"tensor_model_parallel_size: 2026-01-01\nnum_attention_heads: 12:30:45\nmicro_batch_size: 1\n",
    "a broken date": b"tensor_model_parallel_size: 2026-99-99\nmicro_batch_size: 1\n",
    **{f"a tag of nothing: {tag}": f"micro_batch_size: !!{tag} ''\nnum_layers: !!{tag} abc\n".encode() for tag in YAML_TAGS},
    **{f"a tag of a list: {tag}": f"micro_batch_size: !!{tag} [1, {{}}]\nnum_layers: !!{tag} {{}}\n".encode() for tag in YAML_TAGS},
    **{f"a tag in a list: {tag}": f"a:\n- !!{tag} abc\n- !!{tag} ''\n".encode() for tag in YAML_TAGS},
    "numbers that are none": b"micro_batch_size: 0b_\ntensor_model_parallel_size: 0x_\n",
    "a merge of a number": b"micro_batch_size: 1\n<<: 7\n",
    "a key that is a list": b"? [micro_batch_size]\n: 1\n? {a: b}\n: 2\n",
    "a huge number": b'{"train_batch_size": ' + b"9" * 10_000 + b', "num_layers": 1' + b"0" * 9000 + b"}",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_whatever_a_file_holds_it_is_refused_or_read(name: str) -> None:
    for ending in ENDINGS:
        path = Path(f"file{ending}")
        path.write_bytes(CONTENTS[name])
        judged(path)
    assert not Path("hacked").exists()


def test_a_folder_and_no_file_are_refused() -> None:
    for ending in ENDINGS:
        Path(f"folder{ending}").mkdir()
        assert "is a folder" in judged(Path(f"folder{ending}")).message
        assert judged(Path(f"none{ending}")).message
        assert judged(Path(f"{'long' * 65}{ending}")).message
    assert judged(Path("zero\0byte.yaml")).message


def test_a_huge_file_is_refused_without_reading_it() -> None:
    for ending in ENDINGS:
        path = Path(f"huge{ending}")
        with path.open("wb") as file:
            file.write(b"num_layers: 4\n")
            file.truncate(100 << 20)
        tracemalloc.start()
        told = judged(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert told.message and peak < 4 * files.MAX_OTHER_BYTES


def _nested(opening: str, inner: str, closing: str, depth: int) -> str:
    return opening * depth + inner + closing * depth


RUN = (
    "torchrun pretrain_gpt.py --hidden-size 64 --num-attention-heads 1 --micro-batch-size 1 --global-batch-size 16 --seq-length 64 "
    "--max-position-embeddings 64 --vocab-size 128 --num-layers"
)
ONE = "  tensor_model_parallel_size .... 2\n"
BOMBS: dict[str, Callable[[], tuple[str, str]]] = {
    "lists in json": lambda: ("x.json", '{"zero_optimization": ' + _nested("[", "1", "]", 100_000) + "}"),
    "tables in json": lambda: ("x.json", '{"zero_optimization": ' + _nested('{"a":', "1", "}", 100_000) + "}"),
    "shallow lists in json": lambda: ("x.json", '{"train_batch_size": ' + _nested("[", "1", "]", 900) + "}"),
    "lists in yaml": lambda: ("x.yaml", "tensor_model_parallel_size: " + _nested("[", "1", "]", 100_000)),
    "lists in yaml, shallow": lambda: ("x.yaml", "micro_batch_size: 1\ntensor_model_parallel_size: " + _nested("[", "1", "]", 300)),
    "dashes in yaml": lambda: ("x.yaml", "- " * 20_000 + "1"),
    "lists in toml": lambda: ("x.toml", "[training]\nseq_len = " + _nested("[", "1", "]", 100_000)),
    "tables in toml": lambda: ("x.toml", "a" + ".a" * 20_000 + " = 1\n"),
    "aliases": lambda: ("x.yaml", _aliases("[{}]")),
    "aliases of tables": lambda: ("x.yaml", _aliases("{{{}}}", pair="k{}: ")),
    "merged aliases": lambda: ("x.yaml", _merges()),
    "an alias of itself": lambda: ("x.yaml", "&a\nmicro_batch_size: *a\ntensor_model_parallel_size: *a\nmodel: *a\nnum_layers: [*a]\n"),
    "anchors": lambda: ("x.yaml", "".join(f"k{i}: &a{i} {i}\n" for i in range(40_000))),
    "long text in yaml": lambda: ("x.yaml", "tensor_model_parallel_size: '" + "x" * 900_000 + "'\nmicro_batch_size: 1\n"),
    "sixties in yaml": lambda: ("x.yaml", "micro_batch_size: " + "1:" * 300_000 + "1\n"),
    "broken sixties in yaml": lambda: ("x.yaml", "micro_batch_size: " + "1:" * 300_000 + "1.5\n"),
    "a number of thousands of hexadecimal digits": lambda: ("x.yaml", "num_layers: 4\nmicro_batch_size: 0x" + "f" * 5000 + "\n"),
    "the same in toml": lambda: ("x.toml", "[training]\nseq_len = 0x" + "f" * 5000 + "\n[model]\nflavor = '8B'\n"),
    "a key of as many digits": lambda: ("x.yaml", "model: {tensor_model_parallel_size: 1, 0x" + "f" * 5000 + ": 1}\n"),
    "fewer sixties in yaml": lambda: ("x.yaml", "tensor_model_parallel_size: 1\nmicro_batch_size: " + "1:" * 50_000 + "1\n"),
    "octal digits in yaml": lambda: ("x.yaml", "num_layers: 4\nmicro_batch_size: 0" + "7" * 6000 + "\n"),
    "digits in yaml": lambda: ("x.yaml", "num_layers: 4\nmicro_batch_size: '" + "9" * 120_000 + "'\n"),
    "unknown keys in toml": lambda: ("x.toml", "[job]\n[parallelism]\n[training]\n" + _lines("seq_lem{} = 1", 7000)),
    "unknown keys in yaml": lambda: ("x.yaml", "distributed_type: FSDP\nfsdp_config:\n" + _lines("  fsdp_k{}: 1", 7000)),
    "tables merged often": lambda: ("x.yaml", f"a: &a {{{', '.join(f'k{i}: 1' for i in range(1000))}}}\n" + "b: {<<: *a}\n" * 3000),
    "many numbers in yaml": lambda: ("x.yaml", "micro_batch_size: [" + "1," * 500_000 + "]\n"),
    "many tables in toml": lambda: ("x.toml", "".join(f"[t{i}]\n" for i in range(300_000))),
    "many numbers in toml": lambda: ("x.toml", "[training]\nseq_len = [" + "1," * 1_900_000 + "]\n"),
    "deep keys in toml": lambda: ("x.toml", "".join(f"a{i}{'.a' * 500} = 1\n" for i in range(4000))),
    "many numbers in json": lambda: ("x.json", '{"train_batch_size": [' + "1," * 1_900_000 + "1]}"),
    "many keys in json": lambda: ("x.json", '{"train_batch_size": 1, ' + ", ".join(f'"k{i}": {i}' for i in range(200_000)) + "}"),
    "open quote in yaml": lambda: ("x.yaml", "a: 'x\n" * 100_000),
    "colons": lambda: ("x.yaml", "a:" * 300_000),
    "letters in a script": lambda: ("x.sh", RUN + " " + "a" * 200_000),
    "flags in a script": lambda: ("x.sh", RUN + " 4 " + "--a 1 " * 30_000),
    "open quote in a script": lambda: ("x.sh", RUN + " '" + "a b\n" * 50_000),
    "backslashes": lambda: ("x.sh", RUN + " 4 " + "\\\n" * 100_000),
    "dollars": lambda: ("x.sh", RUN + " " + "$" * 200_000),
    "open braces": lambda: ("x.sh", RUN + " " + "${A:-" * 40_000),
    "nested braces": lambda: ("x.sh", RUN + " " + _nested("${A:-", "4", "}", 20_000)),
    "nested commands": lambda: ("x.sh", RUN + " " + _nested("$(", "4", ")", 40_000)),
    "nested sums": lambda: ("x.sh", RUN + " $((" + _nested("(", "4", ")", 50_000) + "))"),
    "a sum of powers": lambda: ("x.sh", RUN + " $((9**9**9**9)) --micro-batch-size $((1<<99999999))"),
    "a sum without end": lambda: ("x.sh", RUN + " $((" + "1+" * 60_000 + "1))"),
    "open brackets": lambda: ("x.sh", "A=(" * 60_000 + "\ntorchrun pretrain_gpt.py --num-layers 4"),
    "a doubling variable": lambda: ("x.sh", "A=xxxxxxxx\n" + "A=$A$A\n" * 200 + RUN + " $A"),
    "a doubling list": lambda: ("x.sh", "A=(x x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 200 + RUN + ' "${A[@]}"'),
    "a circle of variables": lambda: ("x.sh", "A=$B\nB=$A\nA=$B$B\ntorchrun pretrain_gpt.py --num-layers $A"),
    "many variables": lambda: ("x.sh", "".join(f"A{i}=$A{i - 1}x\n" for i in range(1, 12_000)) + RUN + " $A9"),
    "a here-document": lambda: ("x.sh", "cat <<EOF\n" + RUN + " 4\n" * 5_000),
    "many launches": lambda: ("x.sh", RUN + " 4\n" * 6_000),
    "dots in a log": lambda: ("x.log", "  tensor_model_parallel_size .... 2\n  a " + "." * 3_000_000),
    "letters in a log": lambda: ("x.log", ONE + "a" * 3_000_000),
    "brackets in a log": lambda: ("x.log", ONE + "[" * 3_000_000),
    "spaces in a log": lambda: ("x.log", ONE + " " * 3_000_000 + "a"),
    "many lines in a log": lambda: ("x.log", ONE * 100_000),
    "a log of one long number": lambda: ("x.log", "  tensor_model_parallel_size .... " + "9" * 3_000_000),
    "layers in a layout": lambda: ("x.sh", RUN + " 4 --pipeline-model-parallel-layout '" + "(t*9999999|)*9999999" + "'"),
    "layers in a huge layout": lambda: ("x.sh", RUN + " 4 --pipeline-model-parallel-layout '" + "t|" * 60_000 + "'"),
    "many stages": lambda: ("x.sh", RUN + " 900 --pipeline-model-parallel-size 999999999 --tensor-model-parallel-size 999999999"),
    "many chunks": lambda: ("x.sh", RUN + " 900 --num-virtual-stages-per-pipeline-rank 999999999 --pipeline-model-parallel-size 2"),
    "many layers recomputed": lambda: ("x.sh", RUN + " 9 --recompute-granularity full --recompute-num-layers 999999999999"),
    "many experts": lambda: ("x.sh", RUN + " 9 --num-experts 999999999999 --moe-router-topk 9999 --moe-ffn-hidden-size 99999999999"),
    "a pattern of layers": lambda: ("x.sh", RUN + " 9 --num-experts 8 --moe-layer-freq '([0]*999999999+[1]*999999999)*99999'"),
    "a pattern that computes": lambda: ("x.sh", RUN + " 9 --num-experts 8 --moe-layer-freq '9**9**9**9'"),
    "many layers": lambda: ("x.yaml", GOOD["megatron_yaml"].text.replace("num_layers: 32", "num_layers: 999999999999")),
}  # fmt: skip


def _lines(form: str, number: int) -> str:
    """A line per number."""
    return "".join(f"{form.format(place)}\n" for place in range(number))


def _aliases(form: str, pair: str = "") -> str:
    """Ten levels of ten: ten thousand million values, were they written out."""
    lines = ["a0: &a0 " + form.format(", ".join(f"{pair.format(i)}x" for i in range(10)))]
    for level in range(1, 10):
        lines.append(f"a{level}: &a{level} " + form.format(", ".join(f"{pair.format(i)}*a{level - 1}" for i in range(10))))
    lines += ["tensor_model_parallel_size: *a9", "micro_batch_size: *a9", "num_layers: *a9", "model: *a9", "trainer: *a9"]
    return "\n".join(lines) + "\n"


def _merges() -> str:
    """Tables merged into tables, ten at a time."""
    lines = ["a0: &a0 {micro_batch_size: 1}"]
    for level in range(1, 10):
        lines.append(f"a{level}: &a{level}\n  <<: [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join([*lines, "tensor_model_parallel_size: *a9", "micro_batch_size: 1"]) + "\n"


CPU_SECONDS = 90
"""For all of them together: a few tenths of a second each, and the imports."""
READ_ALL = """
import sys, time
from pathlib import Path
from tests.good_configs import judged
for path in sorted(Path(sys.argv[1]).iterdir()):
    print("reading", path.name, flush=True)
    start = time.process_time()
    told = judged(path)
    print("done", path.name, told.config is not None, told.message[:200], flush=True)
    print(f"{time.process_time() - start:.2f}", path.name, file=sys.stderr)
"""


def test_bombs_and_pipes_end(tmp_path: Path) -> None:
    """One process for all of them, under a limit of memory: what hangs is the last that it names."""
    folder = tmp_path / "bombs"
    folder.mkdir()
    for place, (name, make) in enumerate(BOMBS.items()):
        file_name, text = make()
        (folder / f"{place:02d} {name} {file_name}").write_text(text)
    for ending in ENDINGS:
        os.mkfifo(folder / f"pipe{ending}")
    command = f'ulimit -v 3000000; ulimit -t {CPU_SECONDS}; exec {sys.executable} -c "$0" "$1"'
    root = Path(__file__).resolve().parents[1]
    arguments = ["bash", "-c", command, READ_ALL, str(folder)]
    done = subprocess.run(arguments, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    begun = [line for line in done.stdout.splitlines() if line.startswith("reading")]
    assert done.returncode == 0, (begun[-1:], done.stderr[-2000:])
    assert len(begun) == len(BOMBS) + len(ENDINGS)


def test_a_broken_model_file_of_hugging_face_is_refused_or_read() -> None:
    from planner.catalogue.huggingface import read

    path, good = Path("config.json"), json.loads((FOLDER / "huggingface" / "llama-3.2-1b.json").read_text())
    for place in leaves(good):
        for value in WRONG:
            path.write_text(json.dumps(changed(good, place, value)))
            try:
                read(path)
            except InputError as error:
                check_message(str(error))
