"""The rows of the GPU report, in the order in which a reader wants to know them: what is compared with what."""

from __future__ import annotations

from dataclasses import dataclass, replace

from plan import BARE, OURS, PEERS, TUNED, Case, Row
from workload.networks import SIZES

COMPILED = "gpt-bf16-compile"
BARE_LOOP, TUNED_LOOP = Row(BARE), Row(TUNED, is_tuned=True)
OUR_LOOP = Row(OURS, "run.py", is_tuned=True)
LIBRARIES = [replace(peer, is_tuned=True) for peer in PEERS if peer.name != "tutorials' recipe"]
"""With the tuned loop's batches and optimizer: what is left is theirs."""
PACKAGES = {"Accelerate": "accelerate", "Fabric": "lightning", "Lightning Trainer": "lightning"}
PACKAGES |= {"transformers Trainer": "transformers"}


@dataclass(frozen=True)
class Variant:
    """A run of a comparison: a row of its table."""

    label: str
    loop: Row
    case: Case


@dataclass(frozen=True)
class Comparison:
    """Runs of which the page shows the ratios: one table. If a label comes twice, its median counts."""

    name: str
    title: str
    base: str
    """The label that the others are divided by."""
    variants: list[Variant]


def comparisons(memory_gib: float) -> list[Comparison]:
    """Return the comparisons in their order, for a GPU with so much memory. 0: a rehearsal with tiny networks."""
    main, others = [TUNED_LOOP, OUR_LOOP, BARE_LOOP], LIBRARIES
    found = [
        _of_loops(COMPILED, "GPT of 124 M parameters, bf16, compiled", main, memory_gib),
        _of_loops("gpt-bf16", "GPT of 124 M parameters, bf16", [*main, *others], memory_gib),
        _of_loops("resnet-bf16", "ResNet-50, 224 x 224, bf16", [*main, *others], memory_gib),
        _bert(memory_gib),
        _loader(memory_gib),
        _of_loops("resnet-bf16-compile", "ResNet-50, bf16, compiled", main, memory_gib),
        _of_loops("gpt-tf32", "GPT of 124 M parameters, fp32 with TF32", [*main, *others], memory_gib),
        _of_loops("resnet-tf32", "ResNet-50, fp32 with TF32", [*main, *others], memory_gib),
        _of_loops(f"{COMPILED}-libraries", "GPT, bf16, compiled: the libraries", [*main[:2], *others], memory_gib),
        _of_loops("resnet-bf16-compile-libraries", "ResNet-50, bf16, compiled: the libraries", [*main[:2], *others],
                  memory_gib),
    ]  # fmt: skip
    return found


def make_case(work: str, precision: str, memory_gib: float, *, is_compiled: bool = False) -> Case:
    """Return a training of a network. Its data set is as long as the run, so that no epoch ends in it."""
    num_steps, log_every = (150, 25) if work == "bert" else (40, 10)
    batch_size = {"gpt": 32, "resnet": 256, "bert": 32}[work]
    if memory_gib < 60 and work != "bert":
        batch_size //= 4
    if not memory_gib:
        num_steps, log_every, batch_size = 6, 2, 4
    case = Case(work, 1, num_steps, batch_size, num_steps * batch_size, num_warmup_laps=1)
    return replace(
        case,
        device="cuda" if memory_gib else "cpu",
        precision=precision,
        is_compiled=is_compiled,
        size="full" if memory_gib else "tiny",
        log_every=log_every,
        timeout_seconds=150 if is_compiled else 90,
    )


def flops_per_sample(work: str) -> float | None:
    """Return the floating-point operations of a training step per sample, without recomputation, if they are known.

    6 N per token and 12 L H Q T for attention: Chowdhery et al. 2022, arXiv:2204.02311, appendix B, as in nanoGPT,
    which leaves the embeddings of positions out of N.
    """
    if work != "gpt":
        return None
    layers, width, _, vocabulary, length = SIZES["gpt"]["full"].values()
    num_parameters = layers * (12 * width**2 + 2 * width) + width + vocabulary * width
    return float(length * (6 * num_parameters + 12 * layers * width * length))


def _of_loops(name: str, title: str, loops: list[Row], memory_gib: float) -> Comparison:
    work, precision = name.split("-")[:2]
    precision = precision.replace("tf32", "fp32")
    case = make_case(work, precision, memory_gib, is_compiled="compile" in name)
    return Comparison(name, title, TUNED, [Variant(loop.name, loop, case) for loop in loops])


def _bert(memory_gib: float) -> Comparison:
    fp16, fp32, bf16 = (make_case("bert", name, memory_gib) for name in ("fp16", "fp32", "bf16"))
    cases = {
        "fp16": fp16,
        "fp32 without TF32": replace(fp32, use_tf32=False),
        "fp32 with TF32": fp32,
        "bf16": bf16,
    }
    title = "BERT-base, 32 samples of 128 tokens, the generated trainer (the blog: fp32 takes 2.36 x as long as AMP)"
    return Comparison(
        "bert", title, "fp16", [Variant(label, OUR_LOOP, case) for label, case in cases.items()]
    )


def _loader(memory_gib: float) -> Comparison:
    whole = make_case("resnet", "bf16", memory_gib)
    single = replace(whole, data="tuples")
    cases = {"whole batches": whole, "single samples": single}
    cases |= {
        f"single samples, {n} workers": replace(single, num_workers=n)
        for n in ([2, 8] if memory_gib else [2])
    }
    title = "ResNet-50, bf16, the generated trainer: how the images are read"
    return Comparison(
        "loader",
        title,
        "whole batches",
        [Variant(label, OUR_LOOP, case) for label, case in cases.items()],
    )
