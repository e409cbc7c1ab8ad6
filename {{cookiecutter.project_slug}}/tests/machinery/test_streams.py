"""Tests of training sets without a length: two ranks read every item once a pass, and the same items after a kill."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from typing import Any

import pytest

from conftest import Project

NUM_ITEMS = 23
SIZES = (9, 5, 4, 5)  # of four files
STREAMS = '''
from pathlib import Path

SHARDS = Path(__file__).parents[1] / "shards"


@dataclass
class DataConfig(DataConfig):
    kind: str = "plain"


def with_draw(item: dict) -> dict:
    """The item, with random augmentation."""
    return {"id": int(item.get("id", item.get("__key__"))), "draw": torch.rand(()).item()}


class Plain(torch.utils.data.IterableDataset):
    def __iter__(self):
        for index in range(23):
            yield with_draw({"id": index})


class Owner(torch.utils.data.IterableDataset):
    """It draws from a generator of its own, as row 05 of the public cases does."""

    def __init__(self):
        self.rng = __import__("numpy").random.default_rng(0)

    def __iter__(self):
        for index in range(23):
            yield {"id": index, "draw": self.rng.random()}


class SplitByWorker(Plain):
    """As in the documentation of torch: it knows of workers, but not of ranks."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from list(super().__iter__())[info.id if info else 0 :: info.num_workers if info else 1]


class Stateful(Plain):
    """Goes on where it stands, whoever asks for an iterator. A read of an item that is known already is noted."""

    position = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        while self.position < 23:
            self.position += 1
            yield with_draw({"id": (self.position - 1 + self.epoch) % 23})

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


class Sharded(Plain):
    is_sharded = True

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        rank = torch.distributed.get_rank()
        number, of = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(23).tolist()  # as files are shuffled: alike in all parts
        yield from (with_draw({"id": index}) for index in order[rank * of + number :: 2 * of])


def hugging_face(buffer_size: int = 0):
    import datasets

    files = sorted(map(str, SHARDS.glob("*.jsonl")))
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=SHARDS / "cache")
    return (stream.shuffle(seed=1, buffer_size=buffer_size) if buffer_size else stream).map(with_draw)


def split_hugging_face():
    """As scripts for DDP do it, with a shuffle buffer."""
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(hugging_face(6), torch.distributed.get_rank(), torch.distributed.get_world_size())


def webdataset():
    import webdataset

    files = sorted(map(str, SHARDS.glob("*.tar")))
    return webdataset.WebDataset(files, nodesplitter=webdataset.split_by_node, shardshuffle=False).map(with_draw)


KINDS = {"plain": Plain, "owner": Owner, "split_by_worker": SplitByWorker, "stateful": Stateful, "sharded": Sharded}
KINDS |= {"hugging_face": hugging_face, "shuffled": split_hugging_face, "webdataset": webdataset}
KINDS |= {"skipped": lambda: hugging_face().skip(3)}


def collate(items: list) -> Batch:
    if not isinstance(items[0], dict):
        return torch.utils.data.default_collate(items)
    inputs = torch.tensor([[item["id"], item["draw"], 0, 0, 0, 0] for item in items])
    return Batch(inputs, inputs[:, :2] / 23, 1 + inputs[:, 0] % 3)


def build_datasets(config: DataConfig):
    return KINDS[config.kind](), Numbers(config, 8, 2, 0.0)
'''
RECORD = """
def record(step: int, batch: object, request: object, weight: object, rank: int, directory: Path) -> None:
    import json

    line = {"step": step, "items": batch.inputs[:, :2].tolist() if weight else [], "weight": float(weight)}
    line["is_last"] = request.is_last
    with (directory / f"items_{rank}.jsonl").open("a") as file:
        print(json.dumps(line), file=file)
"""
LOOP = "            with strategy.accumulate(is_last_micro_batch=request.is_last):\n"
CALL = "            record(progress.step, batch, request, weight, self.rank.rank, self.directory)\n"
NUM_STEPS = 13  # passes of 3 or 4 steps of 8 items
WORDS = [
    "device_ids=cpu,cpu",
    "training.max_steps=13",
    "training.global_batch_size=8",
    "checkpoint.every_steps=1",
]


@pytest.fixture
def streams(project: Project) -> Project:
    """Return a project that records the items of each step."""
    project.append("dataset.py", STREAMS)
    project.append("trainer.py", RECORD)
    project.edit("trainer.py", LOOP, CALL + LOOP)
    folder = project.folder / "shards"
    folder.mkdir()
    start = 0
    for number, size in enumerate(SIZES):
        ids, start = range(start, start + size), start + size
        lines = [json.dumps({"id": index}) + "\n" for index in ids]
        (folder / f"{number}.jsonl").write_text("".join(lines), encoding="utf-8")
        with tarfile.open(folder / f"{number}.tar", "w") as file:
            for index in ids:
                file.addfile(tarfile.TarInfo(f"{index:04d}.txt"), BytesIO())
    return project


def steps_of(project: Project, name: str, rank: int) -> list[dict[str, Any]]:
    """Return the items and the summed weights of each step on `rank`. Only the last try of a repeated step counts."""
    steps: dict[int, dict[str, Any]] = {}
    items, weight = list[Any](), 0.0
    for line in (
        (project.directory(name) / f"items_{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    ):
        micro_batch = json.loads(line)
        items, weight = items + micro_batch["items"], weight + micro_batch["weight"]
        if micro_batch["is_last"]:
            steps[micro_batch["step"]] = {"items": items, "weight": weight}
            items, weight = [], 0.0
    return [steps[step] for step in sorted(steps)]


def passes(project: Project, name: str) -> list[list[int]]:
    """Return the items that both ranks read in each whole pass. Assert that each step's sizes and weights are right."""
    steps = zip(steps_of(project, name, 0), steps_of(project, name, 1), strict=True)
    found, seen = [], list[int]()
    for first, second in steps:
        sizes = len(first["items"]), len(second["items"])
        assert 0 < sum(sizes) <= 8 and max(sizes) <= 4
        assert (first["weight"], second["weight"]) == pytest.approx(
            [2 * size / sum(sizes) for size in sizes]
        )
        seen += [int(index) for index, _ in first["items"] + second["items"]]
        if len(seen) >= NUM_ITEMS:
            found.append(seen)
            seen = []
    return found


@pytest.mark.parametrize(
    "kinds",
    [
        ["plain", "owner", "split_by_worker", "stateful", "sharded"],
        ["hugging_face", "shuffled", "webdataset"],
    ],
    ids=["generators", "libraries"],
)
def test_each_item_once_a_pass_and_a_resumed_run_reads_those_of_an_undisturbed_one(
    streams: Project, kinds: list[str]
) -> None:
    if "webdataset" in kinds:
        pytest.importorskip("webdataset", reason="WebDataset is not installed")
        pytest.importorskip("datasets", reason="datasets of Hugging Face is not installed")
        assert "comes from skip() or take()" in streams.run(*WORDS, "data.kind=skipped", code=2)
    cases = {
        f"{kind}-{workers}": [*WORDS, f"data.kind={kind}", f"loader.num_workers={workers}"]
        for kind in kinds
        for workers in (0, 2)
    }
    if "plain" in kinds:
        several = [
            "training.micro_batch_size=2",
            "evaluation.every_steps=3",
            "loader.prefetch_factor=4",
        ]
        cases |= {f"{kind}-micro": [*cases[f"{kind}-2"], *several] for kind in ("plain", "sharded")}
    streams.run_many(cases)
    for name in cases:
        found = passes(streams, name)
        assert len(found) >= 2 and all(
            sorted(items) == list(range(NUM_ITEMS)) for items in found
        ), (name, found)
        draws = [
            draw
            for rank in (0, 1)
            for step in steps_of(streams, name, rank)
            for _, draw in step["items"]
        ]
        # The first items of a pass have one augmentation, where the data set shares out by itself.
        # 5 passes
        num_alike = 0 if name.startswith(("plain", "owner", "split_by_worker", "stateful")) else 15
        assert len(draws) > 60 and len(draws) - len(set(draws)) <= num_alike, (
            f"{name}: each has its own augmentation"
        )
        for step in (2, 5):  # in the first pass and in the second
            streams.rewind(name, step, f"{name}-{step}")
    streams.run_many({f"{name}-{step}": words for name, words in cases.items() for step in (2, 5)})
    for name in cases:
        for again in (f"{name}-2", f"{name}-5"):
            assert [steps_of(streams, again, rank) for rank in (0, 1)] == [
                steps_of(streams, name, rank) for rank in (0, 1)
            ], again
            assert streams.lines(again) == streams.lines(name)
            log = (streams.directory(again) / "logs" / "rank_1.log").read_text(encoding="utf-8")
            is_skipped = "by reading all that comes before it" in log
            assert is_skipped == (not name.startswith(("stateful", "hugging_face")))


def test_killed_run_goes_on_with_the_same_items_and_on_as_many_ranks_only(streams: Project) -> None:
    words = [*WORDS, "data.kind=stateful", "loader.num_workers=2"]
    streams.run(*words)
    killed = [*words, "name=killed", "model.fault=kill", "model.fault_step=8"]
    output = streams.run(*killed, code=1)
    assert output.endswith(
        "killed by SIGKILL (out of memory?); see runs/killed/logs/rank_1.log\n"
    ), output
    refused = streams.run(*killed, "device_ids=cpu", code=2)
    assert "it began on 2 ranks x 2 parts, not 1 ranks x 2 parts" in refused
    assert "resuming after step 7" in streams.run(*killed)
    for rank in (0, 1):
        assert steps_of(streams, "killed", rank) == steps_of(streams, "run", rank)
    assert streams.lines("killed") == streams.lines("run")


def test_stream_without_an_end_or_in_unequal_shares_is_refused(streams: Project) -> None:
    assert "training.max_steps=null: " in streams.run("training.global_batch_size=8", code=2)
    assert "checkpoint.every_steps=null: " in streams.run("training.max_steps=3", code=2)
    words = ["training.max_steps=3", "checkpoint.every_steps=1"]
    unequal = streams.run("device_ids=cpu,cpu", *words, "training.global_batch_size=7", code=2)
    assert "training.global_batch_size=7: all ranks read equal shares" in unequal
    streams.append(
        "dataset.py", "def build_datasets(config: DataConfig):\n    return Plain(), Plain()"
    )
    assert "the validation data set has no __len__" in streams.run(*words, code=2)


@pytest.mark.parametrize("name", ["sample_weights", "sample_lengths"])
def test_stream_whose_samples_have_weights_or_lengths_is_refused(
    streams: Project, name: str
) -> None:
    """They would be ignored: a stream gives its items in its own order."""
    code = f"""
class WithSamples(Plain):
    def __init__(self):
        self.dataset = Numbers(DataConfig(), 8, 2, 0.0)
        self.dataset.{name} = [1] * 8


KINDS["plain"] = WithSamples
"""
    streams.append("dataset.py", code)
    output = streams.run(*WORDS, "data.kind=plain", code=2)
    assert f"error: {name}: a training set without __len__ and __getitem__ has none" in output
