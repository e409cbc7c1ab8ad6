"""The faults that the projects' own tests inject one by one: they ship with every project, and are counted here."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from baking import ROOT, bake, plain_environment

from .conftest import Report, Tries

TEMPLATE = "answers to the template's questions that are code, or no names"
FAULTS = {
    "rank killed, hung, frozen or gone by itself, at start-up too": [
        "test_failing.py",
        "test_launching.py::test_rank_that_does_not_arrive_is_named",
        "test_launching.py::test_torchrun_goes_on_after_a_killed_rank",
        "test_resuming.py::test_failure_of_one_rank_is_told_once_and_ends_all",
    ],
    "SIGTERM, SIGUSR1 or Ctrl-C to anyone, under torchrun too": ["test_stopping.py"],
    "disk full, read-only, slow, stumbling; no permission": [
        "test_disk.py",
        "test_checkpoint.py::test_interrupted_write_leaves_the_old_file",
        "test_checkpoint.py::test_disk_that_stumbles_is_tried_again",
        "test_tracking.py::test_line_that_a_full_disk_takes_later_is_not_lost",
    ],
    "second process with the name of a living run": [
        "test_resuming.py::test_second_process_may_not_train_the_same_run",
    ],
    "checkpoint that is empty, no checkpoint, another model's or version's": [
        "test_checkpoint.py::test_damaged_file_is_never_taken_for_a_whole_one",
        "test_checkpoint.py::test_other_files_are_refused_in_one_line",
        "test_checkpoint.py::test_initial_weights_that_are_none_are_refused_in_one_line",
        "test_checkpoint.py::test_initial_weights_that_do_not_fit_are_listed",
        "test_resuming.py::test_checkpoint_of_a_model_that_was_changed_since_is_refused",
        "test_resuming.py::test_damaged_best_checkpoint_costs_its_weights_alone",
        "test_resuming.py::test_what_killed_processes_left_half_written_is_no_obstacle",
    ],
    "checkpoint of another strategy": ["test_strategies.py::test_goes_on_from_a_checkpoint_of_any_strategy"],
    "checkpoint or weights that would run code": ["test_checkpoint.py::test_file_that_would_run_code_is_refused"],
    "config.yaml that is broken, would run code, reads the environment, is a pipe": [
        "test_config_loading.py::test_a_file_that_is_broken_or_hostile_is_refused_in_one_line",
        "test_config_loading.py::test_brackets_on_the_command_line_are_refused_or_read_however_deep",
        "test_config_loading.py::test_a_pipe_is_no_config_that_one_waits_for",
        "test_config_loading.py::test_no_environment_variable_is_read_by_a_default_in_code",
    ],
    "text example's data: wrong rows, other files, what never ends": [
        "test_text_files.py::test_wrong_rows_are_told_with_file_and_line",
        "test_text_files.py::test_files_that_cannot_be_read_are_refused",
        "test_text_files.py::test_what_never_ends_is_not_opened",
        "test_sentences.py::test_wrong_rows_end_a_run_with_one_line_before_it_begins",
    ],
    "item that raises, of another shape, missing, with a NaN; data set empty, too short, of another length": [
        "test_bad_data.py::test_sample_is_named_and_all_ranks_end",
        "test_bad_data.py::test_data_set_that_differs_in_length_between_ranks_is_refused",
        "test_bad_data.py::test_fewer_samples_than_ranks_train_and_no_samples_are_refused",
        "test_evaluation.py::test_validation_sample_that_is_no_number_is_named_and_nothing_is_lost",
        "test_loader.py::test_item_that_cannot_be_read_is_named",
        "test_options.py::test_sample_that_is_no_number_stops_all_ranks_and_is_listed",
        "test_resuming.py::test_run_is_not_continued_on_fewer_samples",
    ],
    "loader worker killed by the system": ["test_bad_data.py::test_worker_that_the_system_ends_is_told"],
    "ranks that differ in batches, speed, model, gradients, config or a flipped bit": [
        "test_bad_data.py::test_rank_twenty_times_slower_trains_the_same",
        "test_bad_data.py::test_model_that_differs_between_ranks_is_refused",
        "test_fsdp.py::test_parameter_without_gradient_is_named",
        "test_fsdp.py::test_what_the_ranks_have_drawn_differently_is_named",
        "test_launching.py::test_ranks_with_unequal_configs_are_refused",
        "test_options.py::test_flipped_bit_is_named",
        "test_training.py::test_loss_that_goes_around_the_model_is_refused",
        "test_training.py::test_parameter_without_gradient_in_a_later_step_is_named_before_the_step_is_made",
        "test_training.py::test_parameter_without_gradient_is_named_and_the_run_stays_as_it_was",
        "test_training.py::test_rank_without_samples_meets_the_same_collectives",
    ],
    "memory that runs out on one rank": [
        "test_training.py::test_out_of_memory_on_one_rank_ends_in_the_same_weights",
        "test_evaluation.py::test_memory_that_runs_out_in_evaluation_halves_what_is_evaluated_at_once",
    ],
    TEMPLATE: [
        "test_answers.py::test_answers_are_never_run_as_code",
        "test_answers.py::test_bad_answer_is_refused_by_its_key",
        "test_answers.py::test_refused_answers_leave_nothing",
    ],
}  # fmt: skip


@pytest.mark.timeout(3600)
def test_faults_of_the_projects_own_tests(template: Path, is_long: bool, report: Report, tmp_path: Path) -> None:
    project = bake(template, tmp_path, example="text")
    rows: dict[str, Tries] = {fault: Tries() for fault in FAULTS}
    left_out: list[str] = []
    for folder in (project, ROOT):
        faults = {fault: tests for fault, tests in FAULTS.items() if (fault == TEMPLATE) == (folder == ROOT)}
        for name, outcome in outcomes(folder, [test for tests in faults.values() for test in tests], is_long).items():
            (fault,) = [key for key, tests in faults.items() if any(is_of(name, test) for test in tests)]
            if outcome.startswith("skipped"):
                left_out.append(f"- {name}: {outcome}")
                continue
            rows[fault].count += 1
            rows[fault].failures += [f"{name}: {outcome}"] if outcome else []
    if not is_long:
        return  # `make test` runs these tests where they are: here, that there is none of these names is an error
    text = "Each try is a test that every project has; some hold several faults."
    if left_out:
        text += " Not tried here:\n\n" + "\n".join(left_out)
    for fault, tries in rows.items():
        assert tries.count > 0, fault
        report(fault, tries, f"## Faults injected one by one\n\n{text}" if fault == next(iter(rows)) else "")


def outcomes(folder: Path, tests: list[str], is_run: bool) -> dict[str, str]:
    """Of each test with each of its parameters what went wrong, why it was skipped, or nothing."""
    junit = folder / "tests.xml" if folder != ROOT else folder / "build" / "campaigns" / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", "-o"]
    command += ["junit_family=xunit1", *([] if is_run else ["--collect-only"]), *(f"tests/{test}" for test in tests)]
    done = subprocess.run(
        command, cwd=folder, env=plain_environment(), check=False, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode in ((0, 1) if is_run else (0,)), done.stdout[-5000:] + done.stderr[-2000:]
    if not is_run:
        return {}
    found = {}
    for case in ET.parse(junit).iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        words = [f"{child.tag}: {child.get('message', '')}" for child in problems]
        words += [(child.text or "")[-2000:] for child in problems if child.tag != "skipped"]  # which tells the place
        found[f"{Path(case.get('file', '')).name}::{case.get('name')}"] = "\n".join(words)
    return found


def is_of(name: str, test: str) -> bool:
    """Whether file::test[parameters] is of that file or that file::test."""
    return test in (name, name.partition("[")[0], name.partition("::")[0])
