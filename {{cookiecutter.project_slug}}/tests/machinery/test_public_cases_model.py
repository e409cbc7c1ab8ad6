"""Tests of cases from public reports about resuming, the model, the optimizer and the average of the weights.

Each has its right result, or is refused in one line before step 1. The numbers are those of the list of cases.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from test_training import DOUBLE
from torch import Tensor

from conftest import Project
from test_resuming import assert_equal

TWO = "device_ids=cpu,cpu"
RANKS = ["device_ids=cpu", TWO]
STRATEGIES = [
    "strategy=ddp device_ids=cpu",
    "strategy=ddp device_ids=cpu,cpu",
    "strategy=fsdp device_ids=cpu,cpu",
]
EVERY_STEP = ("checkpoint.every_steps=1", "checkpoint.every_epochs=null")


def refused(project: Project, *words: str) -> str:
    """Return the one line in which the run is refused before step 1, with exit code 2."""
    output = project.run(*words, code=2)
    assert "Traceback" not in output and not (project.directory("run") / "metrics.jsonl").exists()
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return line


def use_model(project: Project, layers: str, code: str = "") -> None:
    """Let build_model() return nn.Sequential(layers), after `code`, which may define modules."""
    project.append(
        "model.py",
        f"""{code}

def build_model(config: ModelConfig) -> nn.Module:
    model: Any = nn.Sequential({layers})
    model.config, model.num_calls = config, 0
    return model
""",
    )


# 1. Exact resume

COUNTED = """
class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [0.0]

    def forward(self, values: Tensor) -> Tensor:
        return values * (1 + 0.1 * sum(self.seen))

STATE

def after_step(model: Any, step: int, log: Any) -> None:
    model[1].seen = CHANGED
"""
EXTRA_STATE = """
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.seen)

    def set_extra_state(self, state: Tensor) -> None:
        self.seen = state.tolist()
"""
OWN_ENTRY = """
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "seen"] = torch.tensor(self.seen)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if prefix + "seen" in state_dict:
            self.seen = state_dict[prefix + "seen"].tolist()
"""


@pytest.mark.parametrize("words", [*STRATEGIES, f"strategy=deepspeed {TWO}"])
@pytest.mark.parametrize(
    "form", ["extra state", "extra state that grows", "entry of the module's own"]
)
def test_state_that_is_no_memory_of_the_module_is_restored(
    project: Project, form: str, words: str
) -> None:
    """Row 22 of the public cases."""
    if "deepspeed" in words:
        pytest.importorskip("deepspeed")
    changed = "[*model[1].seen, 0.1 * step]" if "grows" in form else "[0.1 * step]"
    code = COUNTED.replace("STATE", OWN_ENTRY if "own" in form else EXTRA_STATE).replace(
        "CHANGED", changed
    )
    use_model(project, "nn.Linear(6, 16), Counted(), nn.Linear(16, 2)", code)
    more = (*words.split(), *EVERY_STEP, "training.epochs=2", "training.ema_decay=0.5")
    more = more if "deepspeed" not in words else more[:-1]  # which has no averages
    project.run(*more)
    project.rewind("run", 5, "again")
    assert "resuming after step 5" in project.run(*more, "name=again")
    assert project.lines("again") == project.lines("run")
    assert project.lines("again", "validation") == project.lines("run", "validation")
    assert assert_equal(project.checkpoint("again", 14), project.checkpoint("run", 14)) > 16
    project.run("evaluate", *more)
    assert project.json("run", "evaluation.json")["loss"] == min(
        x["loss"] for x in project.lines("run", "validation")
    )


def test_extra_state_that_is_no_tensor_is_refused_with_the_remedy(project: Project) -> None:
    """Row 14 of the public cases."""
    state = EXTRA_STATE.replace("torch.tensor(self.seen)", "self.seen").replace(
        "state.tolist()", "state"
    )
    code = COUNTED.replace("STATE", state).replace("CHANGED", "[0.1 * step]")
    use_model(project, "nn.Linear(6, 16), Counted(), nn.Linear(16, 2)", code)
    line = refused(project, TWO)
    assert (
        "state_dict() holds 1._extra_state" in line and "get_extra_state() return a tensor" in line
    )


LOSS_WITH_WEIGHTS = """
CENTERS = nn.Linear(2, 2)
former_loss = compute_loss


def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    loss, outputs = former_loss(model, batch)
    return loss + CENTERS(outputs).square().mean(), outputs


def build_optimizer(model: nn.Module, config: Any) -> Any:
    parameters = [*model.parameters(), *CENTERS.parameters()]
    return OPTIMIZER
"""
STALE = """
former_build = build_model


def build_model(config: ModelConfig) -> nn.Module:
    model = former_build(config)
    KEPT.extend(model.parameters())
    return model


KEPT: list[Any] = []


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(KEPT, lr=0.1)
"""


@pytest.mark.parametrize("words", STRATEGIES)
@pytest.mark.parametrize(
    "optimizer",
    [
        "torch.optim.SGD(parameters, lr=0.1)",
        "torch.optim.AdamW(parameters)",
        "[torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(CENTERS.parameters(), lr=0.1)]",
    ],
)
def test_parameters_that_the_model_does_not_hold_are_refused(
    project: Project, optimizer: str, words: str
) -> None:
    """Row 04 of the public cases."""
    project.append("model.py", LOSS_WITH_WEIGHTS.replace("OPTIMIZER", optimizer))
    line = refused(project, *words.split())
    assert "parameters that the model does not hold" in line and "into the model" in line


def test_parameters_that_a_strategy_has_replaced_are_refused(project: Project) -> None:
    """Row 04 of the public cases, a second form: fsdp shards the model, and the optimizer holds what was there."""
    project.append("model.py", STALE)
    project.run(TWO, "name=ddp", "training.max_steps=2")
    assert "parameters that the model does not hold" in refused(project, TWO, "strategy=fsdp")


# 4. Model, optimizer, average

MODES = """
def after_step(model: Any, step: int, log: Any) -> None:
    print(f"[step {step}: {''.join('et'[module.training] for module in model.modules())}]", flush=True)
"""
MERGED = '''
class Merged(nn.Linear):
    """Changes its weight in eval mode, and changes it back for training, as loralib does."""

    is_merged = False

    def train(self, mode: bool = True) -> Any:
        if self.is_merged == mode:
            self.weight.data *= 0.5 if mode else 2.0
            self.is_merged = not mode
        return super().train(mode)
'''


@pytest.mark.parametrize("words", STRATEGIES)
def test_part_that_build_model_has_set_to_eval_mode_stays_there(
    project: Project, words: str
) -> None:
    """Row 02 of the public cases."""
    layers = "nn.Linear(6, 16), nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5)).eval(), nn.Linear(16, 2)"
    use_model(project, layers, MODES)
    output = project.run(*words.split(), "evaluation.every_steps=3", "training.epochs=1")
    assert [f"[step {step}: tteeet]" in output for step in range(1, 8)] == [True] * 7
    state = project.checkpoint("run", 7)["model"]
    assert (
        torch.equal(state["1.0.running_mean"], torch.zeros(16))
        and state["1.0.num_batches_tracked"] == 0
    )
    assert "left in eval mode by build_model(), where they stay: 1, 1.0, 1.1" in output


def test_model_that_build_model_returns_in_eval_mode_is_trained_in_training_mode(
    project: Project,
) -> None:
    """Row 02 of the public cases: from_pretrained() of Hugging Face returns its models so."""
    use_model(project, "nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 2)", MODES)
    project.edit(
        "model.py", "config, 0\n    return model\n", "config, 0\n    return model.eval()\n"
    )
    output = project.run(TWO, "evaluation.every_steps=3", "training.epochs=1")
    assert [f"[step {step}: tttt]" in output for step in range(1, 8)] == [
        True
    ] * 7 and "eval mode" not in output


@pytest.mark.parametrize("words", STRATEGIES[:2])
def test_evaluation_changes_the_mode_through_the_modules_own_method(
    project: Project, words: str
) -> None:
    """Row 02 of the public cases, a second form: a mode set behind the module's back leaves its weights merged."""
    use_model(project, "nn.Linear(6, 16), Merged(16, 16), nn.Linear(16, 2)", MERGED)
    for name, every in (("never", "null"), ("often", "2")):
        more = (f"name={name}", f"evaluation.every_steps={every}", "evaluation.every_epochs=null")
        project.run(*words.split(), *more, "training.epochs=1")
    assert (
        project.lines("often") == project.lines("never")
        and len(project.lines("often", "validation")) == 4
    )
    assert_equal(project.checkpoint("often", 7)["model"], project.checkpoint("never", 7)["model"])


@pytest.mark.parametrize("words", STRATEGIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_average_of_16_bit_weights_is_kept_in_fp32(
    project: Project, dtype: str, words: str
) -> None:
    """Row 06 of the public cases. The second form is float16, with a part of the model in float32 beside it."""
    use_model(
        project,
        f"In({dtype!r}), nn.Linear(6, 16, dtype=torch.{dtype}), In('float32'), nn.Linear(16, 2)",
        IN,
    )
    if "fsdp" in words:  # a block has one dtype there
        use_model(
            project,
            f"In({dtype!r}), nn.Linear(6, 16, dtype=torch.{dtype}), In('float32'), Head(16, 2)",
        )
    more = (
        *words.split(),
        "training.ema_decay=0.99",
        *EVERY_STEP,
        "checkpoint.keep_last=99",
        "evaluation.every_steps=2",
    )
    project.run(*more)
    expected: dict[str, Tensor] = {}
    for step in range(1, 22):
        state = project.checkpoint("run", step)
        for name, weight in state["model"].items():
            share = 1.0 if step == 1 else 0.01
            expected[name] = expected.get(name, weight.double()).lerp(weight.double(), share)
    num_moved = 0
    for name, weight in state["average"].items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, expected[name].float(), rtol=1e-6, atol=1e-7)
        num_moved += int((weight.to(state["model"][name].dtype) != weight).sum())
    assert num_moved > 50, "the average holds what 16 bits do not"
    project.rewind("run", 9, "again")
    project.run(*more, "name=again")
    assert assert_equal(project.checkpoint("again", 21), state) >= 12
    assert project.lines("again", "validation") == project.lines("run", "validation")
    exported = load_file(project.directory("run") / "model.safetensors")
    assert {name: weight.dtype for name, weight in exported.items()} == {
        name: weight.dtype for name, weight in state["model"].items()
    }


IN = """
class In(nn.Module):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = getattr(torch, dtype)

    def forward(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)


class Head(nn.Sequential):
    def __init__(self, *sizes: int) -> None:
        super().__init__(nn.Linear(*sizes))
"""


@pytest.mark.parametrize("words", STRATEGIES)
@pytest.mark.parametrize(
    "change", ["parameter.clamp_(-0.01, 0.01)", "parameter.mul_(parameter > 0)"]
)
def test_average_is_of_the_weights_that_after_step_leaves(
    project: Project, change: str, words: str
) -> None:
    """Row 18 of the public cases; the second form keeps weights at exactly 0."""
    code = f"    for parameter in model.parameters():\n        {change}"
    project.append(
        "model.py", f"def after_step(model: nn.Module, step: int, log: Any) -> None:\n{code}\n"
    )
    more = (*words.split(), *DOUBLE, "training.ema_decay=0.5", "training.epochs=1", *EVERY_STEP)
    project.run(*more, "checkpoint.keep_last=99")
    average: dict[str, Tensor] = {}
    for step in range(1, 8):
        state = project.checkpoint("run", step)
        for name, weight in state["model"].items():
            average[name] = average.get(name, weight).lerp(weight, 0.5)
            torch.testing.assert_close(
                state["average"][name], average[name], rtol=1e-12, atol=1e-15
            )
    assert all(
        weight.max() <= 0.01 if "clamp" in change else weight.min() >= 0
        for weight in average.values()
    )


def test_after_step_that_gives_ranks_other_weights_is_told_at_step_1(project: Project) -> None:
    """Row 18 of the public cases, a third form: the replicas are compared after all that changes them."""
    code = "    model[0].weight += torch.distributed.get_rank()"
    project.append(
        "model.py", f"def after_step(model: Any, step: int, log: Any) -> None:\n{code}\n"
    )
    assert "after step 1 '0.weight' differs between ranks" in project.run(TWO, code=1)


@pytest.mark.parametrize("words", STRATEGIES)
@pytest.mark.parametrize("form", ["model[2].weight.data", "model[2].weight.data.t()"])
def test_parameters_that_share_memory_by_data_are_refused(
    project: Project, form: str, words: str
) -> None:
    """Row 21 of the public cases; the second form ties a transposed weight. On a GPU such a tie is lost."""
    use_model(project, "nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)")
    project.edit(
        "model.py",
        "config, 0\n    return model\n",
        f"config, 0\n    model[1].weight.data = {form}\n    return model\n",
    )
    line = refused(project, *words.split(), "training.ema_decay=0.5")
    assert "1.weight and 2.weight share memory by .data" in line


DERIVATIVES = """
def compute_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():  # in evaluation too
        inputs = batch.inputs.detach().requires_grad_()
        outputs = model(inputs)
        (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        (curves,) = torch.autograd.grad(slopes.sum(), inputs, create_graph=True)
        return (FORM - batch.inputs).square().mean() + (outputs - batch.targets).square().mean(), outputs
"""


@pytest.mark.parametrize("form", ["slopes", "curves"])
def test_loss_of_gradients_by_the_inputs(project: Project, form: str) -> None:
    """Row 08 of the public cases: the right weights under ddp, one line under fsdp. Second form: two derivatives."""
    project.append("model.py", DERIVATIVES.replace("FORM", form))
    cases = {
        "one": ["device_ids=cpu"],
        "small": ["device_ids=cpu", "training.micro_batch_size=1"],
        "two": [TWO],
    }
    for name, words in cases.items():
        project.run(f"name={name}", *words, *DOUBLE, "training.epochs=1")
    expected = project.checkpoint("one", 7)["model"]
    for name in ("small", "two"):
        for key, weight in project.checkpoint(name, 7)["model"].items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-8, atol=1e-10)
        losses = [line["loss"] for line in project.lines(name, "validation")]
        assert losses == pytest.approx(
            [line["loss"] for line in project.lines("one", "validation")], rel=1e-8
        )
    for more in (
        ["fsdp.reshard_after_forward=true"],
        ["fsdp.reshard_after_forward=false"],
        ["training.precision=bf16"],
    ):
        line = refused(project, "strategy=fsdp", TWO, *more)
        assert "its loss holds a gradient" in line and "Set strategy=ddp" in line


SCALED = """
class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(16, 16), nn.Parameter(torch.tensor(0.5, dtype=DTYPE).reshape(SHAPE))

    def forward(self, values: Tensor) -> Tensor:
        return (self.inner(values) * self.scale).to(values.dtype)
"""


@pytest.mark.parametrize("place", ["block", "root"])
@pytest.mark.parametrize(
    ("shape", "dtype", "told"),
    [("()", "float32", "(a scalar)"), ("(1,)", "float64", "(torch.float64)")],
)
def test_scalars_and_mixed_dtypes_under_fsdp(
    project: Project, place: str, shape: str, dtype: str, told: str
) -> None:
    """Row 11 of the public cases."""
    code = SCALED.replace("DTYPE", f"torch.{dtype}").replace("SHAPE", shape)
    layers = "nn.Linear(6, 16), Scaled(), nn.Linear(16, 2)"
    if place == "root":
        code = code.replace("Scaled(nn.Module)", "Whole(nn.Module)").replace(
            "nn.Linear(16, 16)", "nn.Linear(6, 2)"
        )
    use_model(project, layers, code)
    if place == "root":
        project.edit("model.py", f"nn.Sequential({layers})", "Whole()")
    for name, words in zip(("one", "two"), RANKS, strict=True):
        project.run(words, f"name={name}", "training.max_steps=2")
    line = refused(project, TWO, "strategy=fsdp")
    assert (
        told in line
        and "strategy=ddp" in line
        and ("1.scale" if place == "block" else "scale") in line
    )


@pytest.mark.parametrize("words", STRATEGIES)
@pytest.mark.parametrize("layer", ["nn.LazyLinear(2)", "nn.LazyBatchNorm1d(affine=False)"])
def test_lazy_layers_are_refused(project: Project, layer: str, words: str) -> None:
    """Row 14 of the public cases."""
    use_model(project, f"nn.Linear(6, 2), {layer}")
    assert "has no shape yet" in refused(project, *words.split())


@pytest.mark.parametrize("form", ["{}", "[{}]"])
@pytest.mark.parametrize("words", RANKS)
def test_optimizer_that_needs_a_closure_is_refused(project: Project, words: str, form: str) -> None:
    """Row 14 of the public cases."""
    built = form.format("torch.optim.LBFGS(model.parameters())")
    project.append(
        "model.py",
        f"def build_optimizer(model: nn.Module, config: Any) -> Any:\n    return {built}\n",
    )
    assert "LBFGS" in (line := refused(project, words)) and "closure" in line


def test_sync_batchnorm_on_cpus_is_refused_where_a_layer_needs_it(project: Project) -> None:
    """Row 14 of the public cases."""
    project.run(TWO, "name=without", "training.sync_batchnorm=true", "training.max_steps=1")
    use_model(project, "nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)")
    assert "training.sync_batchnorm=true" in refused(project, TWO, "training.sync_batchnorm=true")
    project.run(
        "device_ids=cpu", "name=one", "training.sync_batchnorm=true", "training.max_steps=1"
    )


@pytest.mark.parametrize("words", RANKS)
@pytest.mark.parametrize(("loss", "kind"), [("None", "NoneType"), ("0.5", "float")])
def test_loss_that_is_no_tensor_is_refused(
    project: Project, loss: str, kind: str, words: str
) -> None:
    """Row 14 of the public cases."""
    body = f"    return {loss}, model(batch.inputs)"
    project.append(
        "model.py", f"def compute_loss(model: nn.Module, batch: Batch) -> Any:\n{body}\n"
    )
    line = refused(project, words)
    assert f"returned a loss of type {kind}" in line and "loss_weight" in line


# Settings that something else overrides


def test_settings_that_something_else_overrides_are_told(project: Project) -> None:
    """Of 'settings that something else overrides in silence': one line each, only for values that are no default."""
    words = ["training.max_steps=1", "evaluation.every_epochs=null"]
    assert "has no effect" not in project.run(*words, "name=default")
    more = [
        "schedule.name=constant",
        "schedule.min_learning_rate=0.001",
        "schedule.milestones=[0.1]",
    ]
    more += [
        "schedule.decay_factor=0.5",
        "schedule.patience=7",
        "fsdp.cpu_offload=true",
        "loader.num_workers=0",
    ]
    output = project.run(*words, *more, "loader.prefetch_factor=3", "name=told")
    told = {
        line.partition("=")[0].split()[-1]
        for line in output.splitlines()
        if "has no effect" in line
    }
    names = {"min_learning_rate", "milestones", "decay_factor", "patience"}
    assert told == {
        *(f"schedule.{name}" for name in names),
        "fsdp.cpu_offload",
        "loader.prefetch_factor",
    }
    right = [
        "schedule.name=plateau",
        "schedule.min_learning_rate=0.001",
        "schedule.decay_factor=0.5",
    ]
    assert "has no effect" not in project.run(words[0], *right, "schedule.patience=7", "name=right")
    # a key whose value is a dict
    whole = "deepspeed.extra={zero_optimization: {overlap_comm: true}}"
    assert (
        project.run(*words, whole, "name=dict").count("deepspeed.extra={'zero_optimization'") == 1
    )
    both = ["strategy=fsdp", "fsdp.reshard_after_forward=false", "ddp.static_graph=true"]
    output = project.run(*words, *both, "name=both", TWO)
    assert output.count("has no effect") == 1 and "ddp.static_graph=true has no effect" in output


def test_settings_beside_functions_of_the_user_are_told(project: Project) -> None:
    """Of 'settings that something else overrides in silence': functions of model.py override settings, too."""
    project.append(
        "model.py",
        """
def learning_rate(step: int, total_steps: int) -> float:
    return 1.0


def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config.learning_rate)
""",
    )
    words = [
        "training.max_steps=1",
        "schedule.warmup_steps=3",
        "schedule.name=plateau",
        "optimizer.name=sgd",
    ]
    output = project.run(*words)
    assert "schedule.warmup_steps=3 has no effect as learning_rate() in model.py" in output
    assert "schedule.name=plateau has no effect as learning_rate() in model.py" in output
    assert "optimizer.name=sgd has no effect unless build_optimizer() in model.py" in output
    assert output.count("has no effect") == 3


# What a reader of the project found in it

OWN_OPTIMIZERS = """
class Counting(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__([*parameters], 0.01)
        self.t = 0
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["m"] = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        COUNT += 1
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["m"] += 1
            parameter.grad /= self.state[parameter]["m"]
        super().step()


class Ahead(torch.optim.Optimizer):
    def __init__(self, inner: Any) -> None:
        self.inner, self.hidden = inner, []
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.hidden = [{"slow": torch.ones(3)}]


def build_optimizer(model: nn.Module, config: Any) -> Any:
    return BUILT
"""


def use_optimizer(project: Project, built: str, count: str = "self.t") -> None:
    code = OWN_OPTIMIZERS.replace("BUILT", built).replace("COUNT", count)
    project.append("model.py", code)


@pytest.mark.parametrize("words", STRATEGIES)
@pytest.mark.parametrize(
    ("built", "name"),
    [
        ("Counting(model.parameters())", "Counting.t"),
        ("[Counting(model.parameters())]", "Counting.t"),
        ("Ahead(torch.optim.AdamW(model.parameters()))", "Ahead.inner"),
        ("Ahead(torch.optim.SGD(model.parameters()))", "Ahead.hidden"),
    ],
)
def test_optimizer_that_keeps_what_no_checkpoint_holds_ends_the_run_after_a_step(
    project: Project, built: str, name: str, words: str
) -> None:
    """A resumed run went on with another state, without a word: Lookahead's losses were 17 % off."""
    use_optimizer(project, built)
    output = project.run(*words.split(), code=2)
    assert f"a step changes {name}, which no checkpoint would hold" in output
    assert not [*project.directory("run").glob("checkpoints/*")]


@pytest.mark.parametrize("words", RANKS)
def test_optimizer_state_under_a_name_ends_the_run_after_a_step(
    project: Project, words: str
) -> None:
    """It failed at the first save, which may come when all the training is done."""
    count = "self.state.setdefault('t', {}).setdefault('count', 0); self.state['t']['count']"
    use_optimizer(project, "Counting(model.parameters())", count)
    assert "a step changes state['t'], which no" in project.run(words, code=2)


@pytest.mark.parametrize("words", STRATEGIES)
def test_counts_in_a_group_and_states_made_before_the_first_step_are_kept(
    project: Project, words: str
) -> None:
    """Of a list of optimizers, states that one makes in its __init__() were lost."""
    count = "self.param_groups[0].setdefault('t', 0); self.param_groups[0]['t']"
    use_optimizer(project, "[Counting(model.parameters())]", count)
    project.run(*words.split(), "checkpoint.every_steps=1", "checkpoint.keep_last=null")
    project.rewind("run", 10, "again")
    project.run(*words.split(), "checkpoint.every_steps=1", "name=again")
    assert project.lines("again") == project.lines("run")
    (group,) = project.checkpoint("again", 21)["optimizer"]["param_groups"]
    assert group["t"] == 21


@pytest.mark.parametrize(("value", "is_told"), [("1e-3", True), ("min(1, step / 1e3)", False)])
def test_learning_rate_that_returns_rates_is_told(
    project: Project, value: str, is_told: bool
) -> None:
    """It is a factor: 1e-3 trained at 3e-6 without a word."""
    code = f"def learning_rate(step: int, total_steps: int) -> float:\n    return {value}\n"
    project.append("model.py", code)
    output = project.run()
    line = "learning_rate() of model.py returns at most 0.001: it is a factor of optimizer"
    assert (line in output) is is_told


NOISY = """
class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)
        self.own = torch.Generator()
"""


@pytest.mark.parametrize("held_by", ["model", "model.py"])
def test_random_generator_of_the_model_is_told(project: Project, held_by: str) -> None:
    """It is neither saved nor alike on other numbers of ranks: resumed losses were 1.8 % off."""
    project.append("dataset.py", "OWN = torch.Generator()")
    line = "holds a random generator, which no checkpoint saves"
    assert line not in project.run("training.max_steps=1", "name=before")
    if held_by == "model.py":
        project.append("model.py", "OWN = torch.Generator()")
    else:
        use_model(project, "Noisy()", NOISY)
    assert line in project.run("training.max_steps=1")


def test_options_that_build_optimizer_sets_otherwise_are_used_from_then_on(
    project: Project,
) -> None:
    """Of a checkpoint of another run, eps was taken over, too: the new one had no effect."""
    code = "def build_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:\n"
    code += "    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate, eps={})\n"
    project.append("model.py", code.format(1e-8))
    project.run("training.max_steps=7")
    project.append("model.py", code.format(1.0))
    path = project.directory("run") / "checkpoints" / "step_00000007.pt"
    project.run(f"checkpoint.resume={path}", "name=other", "training.max_steps=9")
    (group,) = project.checkpoint("other", 9)["optimizer"]["param_groups"]
    assert group["eps"] == 1.0


def test_rate_of_0_is_refused_where_groups_have_their_own(project: Project) -> None:
    """The schedule scales a group's rate by its part of optimizer.learning_rate: all got 0."""
    use_optimizer(project, "torch.optim.SGD(model.parameters(), 0.1)")
    assert "optimizer.learning_rate=0: " in refused(project, "optimizer.learning_rate=0")


CHANGED = """
COUNTS = {"calls": 0}
SCORES: list[Tensor] = []


class Own(nn.Linear):
    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        IN_FORWARD
        return super().forward(inputs)


_plain_update = update_metrics


def update_metrics(metrics: Any, outputs: Tensor, batch: Batch) -> None:
    IN_METRICS
    _plain_update(metrics, outputs, batch)
"""


@pytest.mark.parametrize("words", STRATEGIES)
@pytest.mark.parametrize(
    ("in_forward", "in_metrics", "name"),
    [
        ("self.calls += 1", "", "0.calls"),
        ("COUNTS['calls'] += 1", "", "COUNTS"),
        ("self.seen = inputs.detach().mean().item()", "", "0.seen"),
        ("self.scratch = inputs.mean(); self.kept = {'a': inputs}", "", ""),
        ("FROZEN", "", "1.weight"),
        ("", "SCORES.append(outputs)", "SCORES"),
        ("", "", ""),
    ],
)
def test_what_no_checkpoint_holds_and_trials_change_is_told(
    project: Project, in_forward: str, in_metrics: str, name: str, words: str
) -> None:
    """Annealing by a count in forward() was 5 % off after a resume; scores in a list counted the trials."""
    frozen = "self.other[0].weight.data *= 0.9"
    code = CHANGED.replace("IN_FORWARD", in_forward.replace("FROZEN", frozen) or "pass")
    use_model(
        project, "Own(6, 2), nn.Linear(2, 2)", code.replace("IN_METRICS", in_metrics or "pass")
    )
    more = "    model[1].weight.requires_grad_(False)\n    model[0].other = [model[1]]\n    return model"
    text = project.folder / "template_package" / "model.py"
    text.write_text(text.read_text().rstrip().removesuffix("    return model") + more)
    output = project.run(*words.split(), "training.max_steps=2")
    if in_forward == "FROZEN" and "fsdp" in words:  # a rank's part says little
        name = ""
    line = f"warning: compute_loss or a metric changes {name} of the model or model.py."
    assert output.count("warning: compute_loss or a metric changes") == bool(name), output
    assert not name or line in output


def test_attribute_that_compute_loss_sets_is_the_models_on_any_ranks(project: Project) -> None:
    """On several ranks it was the wrapper's, and forward() did not see it: another loss."""
    use_model(
        project,
        "Scaled(6, 2)",
        """
class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.scale


def build(config: ModelConfig) -> nn.Module:
    return Scaled(6, 2)


def compute_loss(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    model.scale = 0.5
    outputs = model(batch.inputs)
    return (outputs - batch.targets).square().mean(), outputs
""",
    )
    text = project.folder / "template_package" / "model.py"
    text.write_text(text.read_text() + "\n\nbuild_model = build\n")
    for words in RANKS:
        project.run(words, f"name={words[-1] * len(words)}", "training.max_steps=5")
    one, two = (project.lines(words[-1] * len(words)) for words in RANKS)
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)


@pytest.mark.parametrize("words", RANKS)
def test_settings_that_a_function_takes_the_place_of_are_told(project: Project, words: str) -> None:
    """Row 14 of the public cases: a small project said nothing."""
    code = "def learning_rate(step: int, total_steps: int) -> float:\n    return 1.0\n"
    project.append("model.py", code)
    output = project.run(words, "schedule.warmup_steps=2", "training.max_steps=1")
    line = "schedule.warmup_steps=2 has no effect as learning_rate() in model.py takes its place"
    assert line in output


def test_optimizer_with_a_scheduler_of_its_own_is_no_optimizer_with_a_closure(
    project: Project,
) -> None:
    code = "def build_optimizer(model: nn.Module, config: Any) -> Any:\n"
    code += "    optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
    code += "    torch.optim.lr_scheduler.StepLR(optimizer, 10)\n    return optimizer\n"
    project.append("model.py", code)
    project.run("training.max_steps=2")


def test_names_of_lightning_are_told(project: Project) -> None:
    project.append("model.py", "def configure_optimizers(self: Any) -> Any:\n    return None\n")
    line = "the trainer does not use configure_optimizers. Did you mean build_optimizer?"
    assert line in project.run("training.max_steps=1")


def test_optimizer_with_a_cache_and_a_table_that_changes_its_place_trains(project: Project) -> None:
    """As timm's Kron and bitsandbytes have them."""
    use_optimizer(
        project,
        "Cached(model.parameters(), 0.01)",
    )
    project.append(
        "model.py",
        """
class Cached(torch.optim.SGD):
    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.table, self.cache, self.is_ready = {"dynamic": torch.linspace(-1, 1, 1001)}, {}, False

    def step(self, closure: Any = None) -> None:
        self.table["dynamic"], self.is_ready = self.table["dynamic"].clone(), True
        self.cache["expression"], self.made = "ab,bc->ac", object()
        super().step()
""",
    )
    project.run("training.max_steps=2")


def test_plain_run_tells_no_setting_and_no_change(project: Project) -> None:
    """In a small project each setting was told to have no effect."""
    for words in RANKS:
        output = project.run(words, f"name=n{len(words)}", "training.max_steps=3")
        assert "no effect" not in output and "warning" not in output
