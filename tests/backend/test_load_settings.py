"""Settings about the model's file, its devices and RoPE reach llama.cpp; what would end the process does not."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from structlog.testing import capture_logs

from llamaslot.backend.llama import LlamaSettings, LlamaVocab, costs, library, loading
from llamaslot.backend.llama.library import Device
from llamaslot.backend.llama.loading import Rope, context_params, model_params
from llamaslot.base.backend import Status
from llamaslot.base.errors import ConfigError
from llamaslot.base.kv_ops import Save
from tests.backend.test_models import feed, loaded

NONE = Path("none")
GPUS = [Device("CPU", "", 0, 1, 1, 7), Device("GPU0", "a", 1, 60, 80, 8), Device("GPU1", "b", 1, 20, 80, 9)]
PROMPT = list(range(300, 364))
OTHER_ROPE = Rope("linear", 500.0, 0.5, 1024, 1.0, 1.5, 2.0, 16.0)


def params_of(**settings: Any) -> Any:
    return model_params(LlamaSettings(NONE, **settings))


def test_without_flags_the_parameters_are_llama_cpps_own() -> None:
    own, default = params_of(), llama_cpp.llama_model_default_params()
    names = [name for name, _ in llama_cpp.llama_model_params._fields_ if name not in ("progress_callback",)]
    assert [bool(getattr(own, name)) for name in names] == [bool(getattr(default, name)) for name in names]
    made, default = (
        context_params(LlamaSettings(NONE), n_ctx=512, n_seqs=2, n_threads=1),
        (llama_cpp.llama_context_default_params()),
    )
    for name in ("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"):
        assert getattr(made, name) == getattr(default, name)
    for name in ("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "offload_kqv", "op_offload"):
        assert getattr(made, name) == getattr(default, name)


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"load_mode": "none"}, "load_mode", llama_cpp.LLAMA_LOAD_MODE_NONE),
        ({"load_mode": "dio"}, "load_mode", llama_cpp.LLAMA_LOAD_MODE_DIRECT_IO),
        ({"load_mode": "mmap+mlock"}, "load_mode", llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK),
        ({"lazy_mode": "on"}, "lazy_mode", llama_cpp.LLAMA_LAZY_MODE_ON),
        ({"lazy_mode": "off"}, "lazy_mode", llama_cpp.LLAMA_LAZY_MODE_OFF),
        ({"check_tensors": True}, "check_tensors", True),
        ({"repack": False}, "use_extra_bufts", False),
        ({"no_host": True}, "no_host", True),
        ({"split_mode": "none"}, "split_mode", llama_cpp.LLAMA_SPLIT_MODE_NONE),
        ({"split_mode": "row"}, "split_mode", llama_cpp.LLAMA_SPLIT_MODE_ROW),
        ({"n_gpu_layers": 7}, "n_gpu_layers", 7),
    ],
)
def test_a_setting_reaches_the_parameters_of_the_model(settings: dict[str, Any], name: str, value: object) -> None:
    assert getattr(params_of(**settings), name) == value


def test_settings_reach_the_parameters_of_the_context() -> None:
    settings = LlamaSettings(NONE, rope=OTHER_ROPE, kv_offload=False, op_offload=False)
    made = context_params(settings, n_ctx=512, n_seqs=2, n_threads=1)
    assert made.rope_scaling_type == llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR
    assert (made.rope_freq_base, made.rope_freq_scale, made.yarn_orig_ctx) == (500.0, 0.5, 1024)
    assert (made.yarn_ext_factor, made.yarn_attn_factor) == (1.0, 1.5)
    assert (made.yarn_beta_slow, made.yarn_beta_fast) == (2.0, 16.0)
    assert (made.offload_kqv, made.op_offload) == (False, False)


def test_overrides_of_metadata_are_an_array_that_an_empty_key_ends() -> None:
    given = (("a.b", -3), ("c", True), ("d", 0.5), ("e", "text"))
    rows = params_of(overrides=given).kv_overrides
    assert [rows[i].key for i in range(5)] == [b"a.b", b"c", b"d", b"e", b""]
    values = rows[0].value.val_i64, rows[1].value.val_bool, rows[2].value.val_f64, rows[3].value.val_str
    assert values == (-3, True, 0.5, b"text")
    kinds = ("INT", "BOOL", "FLOAT", "STR")
    assert [rows[i].tag for i in range(4)] == [
        getattr(llama_cpp, f"LLAMA_KV_OVERRIDE_TYPE_{kind}") for kind in kinds
    ]


def handles(params: Any, n: int) -> list[int | None]:
    return list((ctypes.c_void_p * n).from_address(params.devices))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, which nothing may use."""
    monkeypatch.setattr(library, "devices", lambda: GPUS)


@pytest.mark.usefixtures("two_gpus")
def test_devices_and_their_shares() -> None:
    assert params_of().devices is None
    assert handles(params_of(devices=("GPU1", "GPU0")), 3) == [9, 8, None]
    assert handles(params_of(devices=()), 1) == [None]
    params = params_of(tensor_split=(3.0, 1.0), main_gpu=1, split_mode="row")
    n = llama_cpp.llama_max_devices()
    assert [params.tensor_split[i] for i in range(n)] == [3.0, 1.0, *[0.0] * (n - 2)]
    assert params.main_gpu == 1


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"main_gpu": 2}, r"--main-gpu 2: the GPUs have the numbers 0 to 1 \(GPU0, GPU1\)"),
        ({"main_gpu": 1, "devices": ("GPU1",)}, r"--main-gpu 1: the GPUs have the numbers 0 to 0 \(GPU1\)"),
        ({"tensor_split": (1.0, 1.0, 1.0)}, r"--tensor-split has 3 shares for 2 GPUs \(GPU0, GPU1\)"),
        ({"devices": ("GPU2",)}, "--device: there is no GPU GPU2; there are GPU0, GPU1"),
        ({"devices": ("CPU",)}, "--device: there is no GPU CPU"),
        ({"devices": ("GPU0", "GPU0")}, "--device: GPU0 is there twice"),
    ],
)
def test_a_device_that_is_not_there_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        params_of(**settings)


@pytest.mark.parametrize("settings", [{}, {"split_mode": "row", "tensor_split": (1.0, 1.0), "main_gpu": 3}])
def test_without_a_gpu_flags_for_several_change_nothing_and_say_so(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(library, "devices", lambda: GPUS[:1])
    with capture_logs() as logs:
        params = params_of(**settings)
    assert not params.tensor_split
    flags = "--split-mode, --tensor-split, --main-gpu"
    assert [each["flag"] for each in logs] == ([flags] if settings else [])


def test_tensors_get_the_memory_that_is_named(tiny_model: Path) -> None:
    params = params_of(tensor_overrides=(("ffn_.*", "CPU"), ("x", "CPU")))
    rows = (loading._BufferOverride * 3).from_address(params.tensor_buft_overrides)
    assert [row.pattern for row in rows] == [b"ffn_.*", b"x", None]
    assert rows[0].kind == rows[1].kind == library.buffer_types()["CPU"]
    with pytest.raises(ConfigError, match="--override-tensor: there is no memory GPU7; use CPU"):
        params_of(tensor_overrides=(("a", "GPU7"),))
    with loaded(tiny_model, tensor_overrides=(("ffn_.*", "CPU"),)) as backend:
        assert feed(backend, 0, PROMPT).status is Status.OK


def test_an_expression_that_llama_cpp_cannot_read_is_an_error_and_ends_nothing(tiny_model: Path) -> None:
    with (
        pytest.raises(ConfigError, match="cannot load"),
        loaded(tiny_model, tensor_overrides=((r"(?<=a)b", "CPU"),)),
    ):
        pass


def saved(model: Path, **settings: Any) -> tuple[bytes, str]:
    """The KV of a prompt, and all that it depends on."""
    with loaded(model, flash_attn="on", **settings) as backend:
        feed(backend, 0, PROMPT)
        backend.change(Save(0, 0, 0, len(PROMPT)))
        kv = backend.kv_of(0)
        assert kv is not None
        return bytes(kv), backend.info.kv_facts


@pytest.mark.parametrize(
    "settings",
    [
        {"rope": Rope(freq_base=500.0)},
        {"rope": Rope(freq_scale=0.5)},
        {"rope": Rope(scaling="yarn", freq_scale=0.5)},
        {"rope": Rope(yarn_attn_factor=2.0)},
        {"overrides": (("llama.rope.freq_base", 500.0),)},
        {"overrides": (("llama.attention.layer_norm_rms_epsilon", 0.5),)},
    ],
)
def test_kv_that_differs_is_stored_under_another_key(tiny_model: Path, settings: dict[str, Any]) -> None:
    """Else it would be reused from disk, or from the remote store, by a server with other flags."""
    plain, changed = saved(tiny_model), saved(tiny_model, **settings)
    assert plain[0] != changed[0]
    assert plain[1] != changed[1]
    assert saved(tiny_model) == plain


def test_every_setting_of_rope_is_in_the_key(tiny_model: Path) -> None:
    facts = {saved(tiny_model)[1]}
    for field in fields(Rope):
        facts.add(saved(tiny_model, rope=replace(Rope(), **{field.name: getattr(OTHER_ROPE, field.name)}))[1])
    assert len(facts) == len(fields(Rope)) + 1


@pytest.mark.parametrize(
    "settings",
    [
        {"load_mode": "none"},
        {"load_mode": "dio"},
        {"lazy_mode": "on"},
        {"check_tensors": True},
        {"tensor_overrides": ((".*", "CPU"),)},
        {"devices": ()},
        {"kv_offload": False, "op_offload": False},
        {"split_mode": "none", "tensor_split": (1.0,)},
    ],
)
def test_what_only_changes_where_weights_are_changes_no_kv(tiny_model: Path, settings: dict[str, Any]) -> None:
    plain = {"n_gpu_layers": 0}
    assert saved(tiny_model, **plain, **settings) == saved(tiny_model, **plain)


def test_an_overridden_key_counts_as_if_the_file_had_it(tiny_model: Path) -> None:
    by_flag = saved(tiny_model, rope=Rope(freq_base=500.0))
    by_file = saved(tiny_model, overrides=(("llama.rope.freq_base", 500.0),))
    assert by_flag[0] == by_file[0]
    with loaded(
        tiny_model, overrides=(("llama.context_length", 300), ("tokenizer.ggml.eos_token_id", 7))
    ) as backend:
        assert (backend.info.n_ctx_train, backend.info.n_ctx_slot, backend.vocab.eos) == (300, 300, 7)
    assert LlamaVocab.load(tiny_model, (("tokenizer.ggml.eos_token_id", 7),)).eos == 7


def test_yarn_expands_the_context_of_a_slot(tiny_model: Path) -> None:
    sizes = []
    for rope in (Rope(), Rope(scaling="yarn", freq_scale=0.5), Rope("yarn", freq_scale=0.5, yarn_orig_ctx=3072)):
        with loaded(tiny_model, n_ctx=8192, n_slots=1, rope=rope) as backend:
            sizes.append(backend.info.n_ctx_slot)
    assert sizes == [4096, 8192, 6144]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((("llama.context_length", 0.5),), "--override-kv: llama.context_length has the type int, not float"),
        ((("llama.rope.freq_base", 7),), "--override-kv: llama.rope.freq_base has the type float, not int"),
    ],
)
def test_an_override_of_another_type_is_refused(
    tiny_model: Path, overrides: Sequence[tuple[str, Any]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said), loaded(tiny_model, overrides=overrides):
        pass


def test_an_override_that_nothing_reads_is_logged(tiny_model: Path) -> None:
    with (
        capture_logs() as logs,
        loaded(tiny_model, overrides=(("llama.contxt_length", 9), ("llama.context_length", 9))),
    ):
        pass
    assert [each["key"] for each in logs if each["event"] == "override_kv.unused"] == ["llama.contxt_length"]


def test_costs_are_kept_for_the_same_settings_alone(tiny_model: Path) -> None:
    with loaded(tiny_model) as backend:
        own = LlamaSettings(tiny_model)
        others = [
            replace(own, rope=Rope(freq_base=500.0)),
            replace(own, tensor_overrides=(("a", "CPU"),)),
            replace(own, kv_offload=False),
            replace(own, split_mode="row"),
            replace(own, repack=False),
            replace(own, numa="distribute"),
            replace(own, overrides=(("a", 1),)),
        ]
        keys = {costs.key_of(each, backend.info, 4) for each in (own, *others)}
    assert len(keys) == len(others) + 1
