"""Tests of strategy=fsdp: each rank holds a part of each weight, and every option computes what DDP computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from configs import config_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformer import TRANSFORMER

from template_package.core.ranks import Rank
from template_package.core.strategies import SENDS_ZEROS
from template_package.strategies.fsdp import FullyShardedStrategy

from conftest import PACKAGE, Project
from test_resuming import assert_equal

WORDS = [
    "device_ids=cpu,cpu",
    "training.epochs=1",
    "training.micro_batch_size=4",
    "training.max_gradient_norm=0.5",
]
SAME = 1e-5  # seven steps of sums in another order


@pytest.fixture
def context() -> Iterator[Rank]:
    """Yield the context of rank 1 of 3, with collectives that do nothing."""
    if dist.is_initialized():  # DeepSpeed's tests leave theirs in this process
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    yield Rank(rank=1, world_size=3, local_rank=1, local_world_size=3)
    dist.destroy_process_group()


def strategy_of(context: Rank, **options: Any) -> FullyShardedStrategy:
    return FullyShardedStrategy(config_of(**options), context)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)]
        )
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 30)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(5.0), persistent=False)


def test_rank_holds_a_part_of_each_weight(context: Rank) -> None:
    strategy, model = strategy_of(context), Model()
    whole = {name: parameter.shape for name, parameter in model.named_parameters()}
    strategy.prepare(model, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
    parts = dict(strategy.module.named_parameters())
    assert {name: part.shape for name, part in parts.items()} == whole
    for name, part in parts.items():
        assert isinstance(part, DTensor), name
        first = -(-whole[name][0] // 3)
        assert part.to_local().shape == (min(first, whole[name][0] - first), *whole[name][1:])
    assert model.head.weight is model.embedding.weight, "a tied weight stays one"
    units = [
        name for name, module in model.named_modules() if type(module).__name__.startswith("FSDP")
    ]
    assert units == ["", "layers.0", "layers.1"]


def test_losses_are_those_of_ddp_within_what_16_bits_allow(project: Project) -> None:
    project.edit("model.py", "def build_model(", TRANSFORMER.lstrip())
    project.edit(
        "model.py", "model.config, model", "model = Transformer()\n    model.config, model"
    )
    options = {
        "bf16": ["training.precision=bf16"],
        "fp16": ["training.precision=fp16"],
        "gathered": ["training.precision=bf16", "fsdp.reshard_after_forward=false"],
        "again": ["training.precision=bf16", "training.activation_checkpointing=true"],
    }
    words = [*WORDS, "checkpoint.every_steps=4", "training.max_gradient_norm=null"]
    cases = {
        f"{s}-{name}": [f"strategy={s}", *words, *options[name]]
        for s in ("ddp", "fsdp")
        for name in options
    }
    del cases["ddp-gathered"]
    project.run_many(cases)
    for name in options:
        reference = f"ddp-{name}" if f"ddp-{name}" in cases else "ddp-bf16"
        # Embeddings and parameters of the block's own are rounded to 16 bits; under ddp autocast reads them in fp32.
        for split, count in (("train", 7), ("validation", 1)):
            losses, expected = (
                [x["loss"] for x in project.lines(of, split)] for of in (f"fsdp-{name}", reference)
            )
            assert losses == pytest.approx(expected, rel=5e-3) and len(losses) == count, name
    project.rewind("fsdp-bf16", 4, "resumed")
    project.run("name=resumed", *cases["fsdp-bf16"])
    assert project.lines("resumed") == project.lines("fsdp-bf16")
    assert_equal(project.checkpoint("resumed", 7), project.checkpoint("fsdp-bf16", 7))


def test_rank_without_a_part_of_a_weight_computes_all_the_same(project: Project) -> None:
    # the last weight has two rows
    words = [
        "device_ids=cpu,cpu,cpu",
        *WORDS[1:],
        "checkpoint.every_steps=4",
    ]
    project.run_many({"ddp": words, "fsdp": ["strategy=fsdp", *words]})
    for split in ("train", "validation"):
        losses, expected = (
            [line["loss"] for line in project.lines(name, split)] for name in ("fsdp", "ddp")
        )
        assert losses == pytest.approx(expected, rel=SAME)
    project.rewind("fsdp", 4, "resumed")
    project.run("name=resumed", "strategy=fsdp", *words)
    assert project.lines("resumed") == project.lines("fsdp")
    assert (
        assert_equal(project.checkpoint("resumed", 7), project.checkpoint("fsdp", 7)) >= 6 + 3 * 6
    )


def test_one_rank_may_offload_too(project: Project) -> None:
    words = ["device_ids=cpu", *WORDS[1:]]
    project.run_many(
        {"plain": words, "offload": ["strategy=fsdp", "fsdp.cpu_offload=true", *words]}
    )
    assert project.lines("offload") == project.lines("plain")


def test_gradient_that_is_no_number_on_one_rank_ends_all_before_it_is_saved(
    project: Project,
) -> None:
    output = project.run("strategy=fsdp", "device_ids=cpu,cpu", "data.nan_index=17", code=1)
    assert "is not finite" in output and output.count("error: ") == 1 and "Traceback" not in output


def test_parameter_without_gradient_is_named(project: Project) -> None:
    words = ["strategy=fsdp", "device_ids=cpu,cpu", "training.micro_batch_size=8"]
    output = project.run(*words, "model.has_unused_parameter=true", "name=unused", code=2)
    assert "unused got no gradient" in output and "Traceback" not in output


EXPERTS = '''
class Experts(nn.Module):
    """Two layers, both used in the rehearsals. Then the loss needs one: another one on each rank and micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)
        self.num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.num_calls += self.training
        outputs = self.first(inputs), self.second(inputs)
        is_single = self.training and self.num_calls > 2
        return outputs[(torch.distributed.get_rank() + self.num_calls) % 2] if is_single else outputs[0] + outputs[1]


def build_model('''


@pytest.mark.parametrize("is_old", [False, True])
def test_ranks_whose_losses_need_different_weights_train_or_are_refused(
    project: Project, is_old: bool
) -> None:
    """Before torch 2.13, FSDP adds up what ranks send, and these gradients of two layers have the same shape."""
    if not is_old and not SENDS_ZEROS:
        pytest.skip("this torch cannot train it")
    project.edit("model.py", "def build_model(", EXPERTS.lstrip())
    project.edit(
        "model.py",
        "model.config, model",
        "model = nn.Sequential(Experts())\n    model.config, model",
    )
    if is_old:
        project.edit(
            "core/strategies.py", 'hasattr(FSDPModule, "set_reduce_scatter_unused_params")', "False"
        )
    output = project.run(
        "strategy=fsdp", *WORDS, "evaluation.every_epochs=null", code=2 if is_old else 0
    )
    assert ("got no gradient" in output) == is_old and "Traceback" not in output


@pytest.mark.slow
def test_compiled_model_computes_the_same(project: Project) -> None:
    project.run_many(
        {
            "plain": ["strategy=fsdp", *WORDS],
            "compiled": ["strategy=fsdp", *WORDS, "training.compile=true"],
        }
    )
    plain, compiled = (
        [line["loss"] for line in project.lines(name)] for name in ("plain", "compiled")
    )
    assert compiled == pytest.approx(plain, rel=SAME)


MEASURED = '''
def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss; and it prints the bytes of whole weights that live on after forward, and of whole gradients before."""
    import gc

    shapes = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() > 1}
    shapes |= {shape[::-1] for shape in shapes}
    saved = {}

    def is_whole(tensor: Any) -> bool:
        return tuple(tensor.shape) in shapes and type(tensor).__name__ != "DTensor"

    def pack(tensor: Tensor) -> Tensor:
        if is_whole(tensor):
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    # Weights that FSDP has resharded have a storage of no bytes.
    living = [t for t in gc.get_objects() if type(t) is Tensor and t.is_floating_point()]
    for module in model.modules():  # gradients that only C++ refers to
        group = getattr(getattr(module, "_get_fsdp_state", dict)(), "_fsdp_param_group", None)
        for parameter in group.fsdp_params if group else ():
            living += [grad for grad in [getattr(parameter, "_unsharded_param", parameter.sharded_param).grad]
                       if grad is not None and type(grad) is Tensor]
    gradients = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in living if is_whole(t)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(batch.inputs)
    weights = sum(storage.nbytes() for storage in saved.values())
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    if model.training:
        print(f"whole weights {weights / size:.3f}, whole gradients {sum(gradients.values()) / size:.3f}")
    return (outputs - batch.targets).square().mean(), outputs
'''


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_rank_keeps_whole_weights_or_gradients(project: Project, precision: str) -> None:
    """No whole weight lives between forward and backward, and no whole gradient between two micro-batches."""
    # Widths of which half is no width of another weight: parts do not look like whole ones.
    project.edit(
        "model.py", "def build_model(", TRANSFORMER.lstrip().replace("16", "20").replace("32", "44")
    )
    project.edit(
        "model.py", "model.config, model", "model = Transformer()\n    model.config, model"
    )
    path = project.folder / PACKAGE / "model.py"
    path.write_text(path.read_text("utf-8") + MEASURED, encoding="utf-8")
    project.run(
        "strategy=fsdp", "device_ids=cpu,cpu", f"training.precision={precision}", *WORDS[1:]
    )
    for rank in range(2):
        log = (project.directory("run") / "logs" / f"rank_{rank}.log").read_text(encoding="utf-8")
        found = re.findall(r"whole weights (\S+), whole gradients (\S+)", log)
        assert len(found) > 10
        assert max(float(weights) for weights, _ in found) <= 0.05, log
        assert max(float(gradients) for _, gradients in found) <= 0.05, log


def test_norm_that_is_a_block_and_norms_with_one_weight_train(context: Rank) -> None:
    norm, shared = nn.LayerNorm([2, 8]), nn.LayerNorm(8)
    shared.weight = norm_weight = nn.Parameter(torch.ones(8))
    other = nn.LayerNorm(8)
    other.weight = norm_weight
    model = nn.Sequential(nn.Linear(8, 8), norm, nn.Sequential(nn.Linear(8, 8), shared), other)
    strategy = strategy_of(context, precision="bf16")
    strategy.prepare(model, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))


HELD = """
from functools import lru_cache


@lru_cache
def table():
    return torch.ones(3)


class Helper:
    __slots__ = ("scale",)


class Scaled(nn.Linear):
    def get_extra_state(self):
        return torch.ones(1)

    def set_extra_state(self, state):
        pass


_build = build_model


def build_model(config):
    model = _build(config)
    helper = Helper()
    helper.scale = {value}
    model.helper = helper
    print("built with values:", not next(model.parameters()).is_meta, flush=True)
    return model
"""


def test_other_ranks_build_the_model_without_memory(project: Project) -> None:
    project.append("model.py", HELD.format(value="None"))
    words = [*WORDS, "strategy=fsdp", "training.ema_decay=0.9", "checkpoint.keep_last=null"]
    project.run_many({"whole": words, "meta": [*words, "fsdp.meta_build=true"]})
    assert project.lines("meta") == project.lines("whole")
    assert_equal(project.checkpoint("meta", 7), project.checkpoint("whole", 7))
    weights = project.directory("whole") / "model.safetensors"
    for name, more in (("whole", "false"), ("meta", "true")):  # the same from other weights
        project.run(
            f"name=from-{name}",
            *words,
            f"checkpoint.initial_weights={weights}",
            f"fsdp.meta_build={more}",
        )
    assert project.lines("from-meta") == project.lines("from-whole") != project.lines("whole")
    for rank in (0, 1):
        log = (project.directory("meta") / "logs" / f"rank_{rank}.log").read_text()
        assert f"built with values: {rank == 0}" in log


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("float(next(model.parameters()).sum())", "needs values"),
        ("table()", "keeps a tensor (3,) that is neither parameter nor buffer"),
        ("{1: [torch.ones(2)]}", "keeps a tensor (2,) that is neither parameter nor buffer"),
        ('float(torch.rand(1, device="cpu"))', "draws on the CPU"),
        (
            "setattr(model, 'place', next(model.parameters()).device)",
            "keeps the device of a tensor",
        ),
        ("model.append(Scaled(2, 2))", "has extra state"),
    ],
)
def test_model_that_could_differ_without_values_is_refused(
    project: Project, value: str, problem: str
) -> None:
    project.append("model.py", HELD.format(value=value))
    output = project.run(*WORDS, "strategy=fsdp", "fsdp.meta_build=true", code=2)
    assert f"fsdp.meta_build=true: build_model() of model.py {problem}" in output


def test_replicas_hold_the_weights_twice_and_change_no_result(project: Project) -> None:
    four = ["strategy=fsdp", "device_ids=cpu,cpu,cpu,cpu", *WORDS[1:], "checkpoint.every_steps=4"]
    project.run_many({f"in-{n}": [*four, f"fsdp.replicas={n}"] for n in (1, 2, 4)})
    expected = project.lines("in-1", "train")
    for number in (2, 4):
        for line, same in zip(project.lines(f"in-{number}", "train"), expected, strict=True):
            assert line["loss"] == pytest.approx(same["loss"], rel=SAME)
            assert line["gradient_norm"] == pytest.approx(same["gradient_norm"], rel=SAME)
    others = {"whole": ["strategy=ddp", WORDS[0]], "one": ["strategy=fsdp", "device_ids=cpu"]}
    for name, words in others.items():  # it goes on elsewhere
        project.rewind("in-2", 4, name)
        project.run(f"name={name}", *words, *WORDS[1:])
        losses = [line["loss"] for line in project.lines(name, "train")]
        assert losses == pytest.approx([line["loss"] for line in expected], rel=SAME)
    problem = project.run("name=odd", *four, "fsdp.replicas=3", code=2)
    assert "fsdp.replicas=3: must divide the 4 ranks" in problem


@pytest.mark.parametrize(("replicas", "rows"), [(1, 2), (3, 6)])
def test_rank_holds_its_part_of_its_replica(context: Rank, replicas: int, rows: int) -> None:
    config = config_of()
    config.fsdp.replicas = replicas
    strategy = FullyShardedStrategy(config, context)
    strategy.prepare(nn.Sequential(nn.Linear(4, 6)), None)
    (weight, _) = strategy.module.parameters()
    assert isinstance(weight, DTensor)
    assert weight.to_local().shape == (rows, 4)


def test_eight_and_sixteen_ranks_train_as_one_process_does(project: Project) -> None:
    words = ["training.epochs=1", "training.global_batch_size=20", "training.max_steps=3"]
    cases = {
        "one": ["device_ids=cpu"],
        "eight": ["device_ids=" + ",".join(["cpu"] * 8), "strategy=fsdp", "fsdp.replicas=2"],
        "sixteen": ["device_ids=" + ",".join(["cpu"] * 16)],
        "parts": ["device_ids=" + ",".join(["cpu"] * 16), "strategy=fsdp"],
    }
    for name, more in cases.items():
        project.run(f"name={name}", *words, *more)
    for split in ("train", "validation"):
        expected = [line["loss"] for line in project.lines("one", split)]
        for name in cases:
            losses = [line["loss"] for line in project.lines(name, split)]
            assert losses == pytest.approx(expected, rel=SAME), name
