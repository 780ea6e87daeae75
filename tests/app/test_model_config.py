"""Flags about the model and its devices whose values have a form of their own: wrong ones are refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamaslot.app.config import Config
from llamaslot.app.model_config import engine_cpus, metadata_overrides, tensor_overrides
from llamaslot.base.errors import ConfigError
from tests.app.test_config import read
from tests.forked import Command
from tests.live import serving


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("-ts 1,x", "--tensor-split: '1,x' is not a list of numbers"),
        ("-ts 1,,", "--tensor-split"),
        ("-ts 1,-1", "--tensor-split: '1,-1' has no share above 0, or one below it"),
        ("-ts 0,0", "--tensor-split: '0,0' has no share"),
        ("-ts 1,nan", "--tensor-split"),
        ("-ts inf", "--tensor-split"),
        ("-sm tensor", "--split-mode: 'tensor', an experiment"),
        ("-sm rows", "--split-mode: 'rows' is invalid"),
        ("-mg -1", "--main-gpu"),
        ("-ot (=CPU", "--override-tensor: '\\(' is no regular expression"),
        ("-ot CPU", "--override-tensor: 'CPU' is not REGEX=TYPE"),
        ("-ot a=CPU,", "--override-tensor: '' is not REGEX=TYPE"),
        ("-ot =CPU", "--override-tensor: '=CPU' is not"),
        ("-ot a=", "--override-tensor: 'a=' is not"),
        ("-ncmoe -1", "--n-cpu-moe"),
        ("--override-kv a", "--override-kv: 'a' is not KEY=TYPE:VALUE"),
        ("--override-kv a=int", "--override-kv: 'a=int' is not KEY"),
        ("--override-kv a=u32:1", "--override-kv: 'u32' for a is not one of int, float, bool, str"),
        ("--override-kv a=int:1.5", "--override-kv: '1.5' is no value of type int for a"),
        ("--override-kv a=int:9223372036854775808", "--override-kv: '9223372036854775808' is no value"),
        ("--override-kv a=int:4294967296", "--override-kv: '4294967296' is no value of type int for a"),
        ("--override-kv a=int:-2147483649", "--override-kv: '-2147483649' is no value of type int for a"),
        ("--override-kv a.context_length=int:-1", "'-1' for a.context_length is not a number of 1 to 2147483647"),
        ("--override-kv a.rms_epsilon=float:-1", "'-1' for a.rms_epsilon is less than 0"),
        ("--override-kv a=float:nan", "--override-kv: 'nan' is no value of type float"),
        ("--override-kv a=bool:1", "--override-kv: '1' is no value of type bool"),
        (f"--override-kv a=str:{'x' * 128}", "is no value of at most 127 bytes of type str for a"),
        (f"--override-kv {'k' * 128}=int:1", "is not a key of 1 to 127 bytes"),
        ("--override-kv =int:1", "--override-kv: '' is not a key"),
        ('--override-kv a=int:1,"b', "--override-kv: .* has a quote that does not end"),
        ("--override-kv general.architecture=str:qwen3", "general.architecture cannot be changed"),
        ("--override-kv llama.attention.causal=bool:false", "llama.attention.causal cannot be changed"),
        ("--rope-scale 0", "--rope-scale"),
        ("--rope-scale nan", "--rope-scale"),
        ("--rope-scale 2 --rope-freq-scale 0.5", "--rope-scale: give --rope-scale or --rope-freq-scale"),
        ("--rope-freq-base -1", "--rope-freq-base"),
        ("--rope-scaling longrope", "--rope-scaling"),
        ("--yarn-orig-ctx -1", "--yarn-orig-ctx"),
        ("--yarn-beta-fast inf", "--yarn-beta-fast"),
        ("--load-mode mmap --mlock", "--load-mode: it replaces --mmap, --mlock and --direct-io"),
        ("--load-mode fast", "--load-mode: 'fast' is invalid"),
        ("--direct-io --mlock", "--direct-io: what is locked in RAM"),
        ("--numa yes", "--numa: 'yes' is invalid"),
        ("-C xyz", "--cpu-mask: 'xyz' is not a hexadecimal number"),
        ("-C 0x", "--cpu-mask: '0x' is not"),
        ("-C 0", "--cpu-mask: '0' names no CPU"),
        ("-Cr 3", "--cpu-range: '3' is not LO-HI"),
        ("-Cr 3-1", "--cpu-range: '3-1' is not LO-HI"),
        ("-Cr a-b", "--cpu-range: 'a-b' is not LO-HI"),
        ("-hff x.gguf", "--hf-file: give its repository too"),
        ("-hf name", "--hf-repo: 'name' is not OWNER/REPO"),
        ("-hf a/b:Q8_0:x", "--hf-repo: 'a/b:Q8_0:x' is not"),
        ("-hf a/b -m x.gguf", "--hf-repo: --model names another model, x.gguf"),
        ("-hf a/b -hff x.bin", "--hf-file: 'x.bin' is not a .gguf file"),
    ],
)
def test_wrong_values_are_refused_by_the_flag(argv: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read(argv.split())
    assert "\n" not in caught.value.message


def test_values_that_need_quotes_or_have_signs_of_their_own() -> None:
    argv = ["--override-kv", 'a=str:x,"b=str:y,z","c=str:say ""hi"""', "--override-kv", "a=int:1"]
    assert metadata_overrides(read(argv)) == {"a": "x", "b": "y,z", "c": 'say "hi"'}, "the first one counts"
    assert tensor_overrides(read(["-ot", r"blk\.\d+\.=CPU", "-ot", "x=CUDA0"])) == (
        (r"blk\.\d+\.", "CPU"),
        ("x", "CUDA0"),
    )
    [(pattern, _)] = tensor_overrides(read(["-ncmoe", "2147483647"]))
    assert len(pattern) < 4000, "no model has more layers than llama.cpp's limit"


@pytest.mark.parametrize(
    ("argv", "cpus"),
    [
        ("", set()),
        ("-C 5", {0, 2}),
        ("-C 0xF0", {4, 5, 6, 7}),
        (f"-C 1{'0' * 32}", {128}),
        ("-Cr 2-3", {2, 3}),
        ("--cpu-range=-1", {0, 1}),
        ("-C 1 -Cr 6-7", {0, 6, 7}),
    ],
)
def test_cpus(argv: str, cpus: set[int]) -> None:
    assert engine_cpus(read(argv.split())) == cpus


def test_an_open_range_of_cpus_has_all_others() -> None:
    assert {2, 3, 1000} < engine_cpus(Config(cpu_range="2-"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_the_threads_that_compute_keep_to_the_cpus_that_are_named(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    with serving(tmp_path, "--cpu-range", f"{cpu}-{cpu}", "--in-process", "-c", "512") as server:
        tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
        allowed = [
            line.split()[1]
            for task in tasks
            for line in (task / "status").read_text().splitlines()
            if line.startswith("Cpus_allowed_list")
        ]
    assert str(cpu) in allowed
    if len(os.sched_getaffinity(0)) > 1:
        assert set(allowed) != {str(cpu)}, "the other threads may run anywhere"
    done = Command("serve", "-m", "demo", "--cpu-mask", f"1{'0' * 200}", folder=tmp_path).finish()
    assert done.returncode == 2
    assert "--cpu-mask names no CPU that this process may use, such as " in done.stderr
