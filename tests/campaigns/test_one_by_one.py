"""Runs the other tests that inject faults one by one, and counts their outcomes by the kind of fault."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from baking import PROJECT, ROOT, bake, plain_environment

from .conftest import REPORTS, Report, Tries

IN_PLACE = {
    "rank killed, hung, or gone by itself, at start-up too": [
        "machinery/test_failing.py",
        "machinery/test_launching.py::test_rank_whose_neighbour_never_starts_fails_in_time",
        "machinery/test_launching.py::test_torchrun_goes_on_after_a_killed_rank",
        "machinery/test_launching.py::test_torchrun_goes_on_after_a_rank_that_was_killed_in_an_evaluation",
        "test_resuming.py::test_failure_of_one_rank_is_told_once_and_ends_all",
    ],
    "SIGTERM, SIGUSR1 or Ctrl-C to any process, under torchrun too": ["machinery/test_stopping.py"],
    "disk full, read-only, slow, away; no permission": [
        "machinery/test_disk.py",
        "machinery/test_checkpoint.py::test_interrupted_write_leaves_the_old_file",
        "machinery/test_checkpoint.py::test_disk_that_does_not_answer_is_no_damaged_file",
        "machinery/test_tracking.py::test_line_that_the_disk_refuses_ends_the_run_in_one_line",
    ],
    "two runs started in the same second; a second process with the name of a living run": [
        "machinery/test_devices.py::test_runs_started_at_once_by_two_users_share_no_gpu",
        "machinery/test_same_name.py::test_second_process_may_not_train_the_same_run",
        "machinery/test_same_name.py::test_two_runs_started_together_both_train",
    ],
    "checkpoint that is damaged, no checkpoint, or another model's": [
        "machinery/test_checkpoint.py::test_damaged_file_is_never_taken_for_a_whole_one",
        "machinery/test_checkpoint.py::test_other_files_are_refused_in_one_line",
        "machinery/test_checkpoint.py::test_state_that_could_not_be_read_again_is_told_at_the_first_save",
        "machinery/test_checkpoint.py::test_initial_weights_that_do_not_fit_are_listed",
        "machinery/test_same_name.py::test_checkpoint_of_a_model_that_was_changed_since_is_refused",
        "machinery/test_same_name.py::test_damaged_best_checkpoint_costs_its_weights_alone",
        "machinery/test_same_name.py::test_file_that_a_killed_process_left_half_written_is_removed",
        "test_resuming.py::test_flipped_bit_in_a_checkpoint_is_found_and_the_one_before_is_taken",
    ],
    "checkpoint of another strategy": ["machinery/test_strategies.py::test_goes_on_from_a_checkpoint_of_any_strategy"],
    "checkpoint or weights that would run code": [
        "machinery/test_checkpoint.py::test_file_that_would_run_code_is_refused",
    ],
    "config.yaml or command line with a mistake": [
        "test_config.py::test_a_mistake_in_the_file_is_one_line",
        "test_config.py::test_a_mistake_on_the_command_line_is_one_line_with_the_remedy",
        "test_config.py::test_every_key_names_itself_when_it_refuses_a_value",
    ],
    "item that raises, of another shape, missing, with a NaN; data set empty, too short, of another length": [
        "machinery/test_bad_data.py::test_samples_of_the_micro_batch_are_named_and_all_ranks_end",
        "machinery/test_bad_data.py::test_data_set_that_differs_in_length_between_ranks_is_refused",
        "machinery/test_bad_data.py::test_fewer_samples_than_ranks_train_and_no_samples_are_refused",
        "machinery/test_evaluation.py::test_metric_that_is_no_number_is_never_the_best",
        "machinery/test_options.py::test_loss_that_is_not_finite_ends_all_ranks_before_it_is_saved",
        "machinery/test_same_name.py::test_run_is_not_continued_on_fewer_samples",
        "test_loader.py::test_samples_of_a_micro_batch_that_cannot_be_read_are_named",
    ],
    "loader worker killed by the system": [
        "machinery/test_bad_data.py::test_worker_that_the_system_ends_is_told",
        "machinery/test_bad_data.py::test_worker_that_the_system_ends_while_its_rank_computes_is_told",
    ],
    "ranks that differ in batches, speed, model, gradients, config or a flipped bit": [
        "machinery/test_bad_data.py::test_rank_twenty_times_slower_trains_the_same",
        "machinery/test_bad_data.py::test_model_that_differs_between_ranks_is_refused",
        "machinery/test_fsdp.py::test_parameter_without_gradient_is_named",
        "machinery/test_launching.py::test_ranks_with_unequal_configs_are_refused",
        "machinery/test_options.py::test_flipped_bit_is_named",
        "machinery/test_rehearsal.py::test_loss_that_goes_around_the_model_is_refused",
        "machinery/test_rehearsal.py::test_parameter_without_gradient_in_a_later_step_ends_the_run_before_the_step_is_made",
        "machinery/test_rehearsal.py::test_parameter_without_gradient_is_named_and_the_run_stays_as_it_was",
        "test_training.py::test_rank_without_samples_meets_the_same_collectives",
    ],
    "memory that runs out on one rank": [
        "machinery/test_rehearsal.py::test_out_of_memory_on_one_rank_ends_in_the_same_weights",
    ],
    "evaluation that fails": [
        "machinery/test_rehearsal.py::test_typo_in_update_metrics_is_told_before_the_first_step",
        "test_resuming.py::test_evaluation_that_fails_costs_no_step_and_is_repeated",
    ],
}  # fmt: skip
IN_TEXT_PROJECT = {
    "text example's data: wrong rows, other files": [
        "test_text_files.py::test_wrong_rows_are_told_with_file_and_line",
        "test_text_files.py::test_files_that_cannot_be_read_are_refused",
        "test_sentences.py::test_wrong_rows_end_a_run_with_one_line_before_it_begins",
    ],
}
IN_TEMPLATE = {
    "answers to the template's questions that are code, or no names": [
        "test_answers.py::test_answers_are_never_run_as_code",
        "test_answers.py::test_bad_answer_is_refused_by_its_key",
        "test_answers.py::test_refused_answers_leave_nothing",
    ],
}


@pytest.mark.timeout(7200)
def test_faults_that_other_tests_inject(
    template: Path, is_long: bool, report: Report, tmp_path: Path
) -> None:
    text_project = bake(template, tmp_path, example="text")
    rows: dict[str, Tries] = {}
    left_out: list[str] = []
    for folder, faults in (
        (ROOT / PROJECT, IN_PLACE),
        (text_project, IN_TEXT_PROJECT),
        (ROOT, IN_TEMPLATE),
    ):
        rows |= {fault: Tries() for fault in faults}
        for name, outcome in outcomes(
            folder, [test for tests in faults.values() for test in tests], is_long
        ).items():
            (fault,) = [
                key for key, tests in faults.items() if any(is_of(name, test) for test in tests)
            ]
            if outcome.startswith("skipped"):
                left_out.append(f"- {name}: {outcome}")
                continue
            rows[fault].count += 1
            rows[fault].failures += [f"{name}: {outcome}"] if outcome else []
    if not is_long:
        return  # `make test-all` runs these tests where they are: here, a name that does not exist is an error
    text = "## Faults injected one by one\n\nEach try is a test; some tests inject several faults."
    if left_out:
        text += " Not tried here:\n\n" + "\n".join(left_out)
    for fault, tries in rows.items():
        assert tries.count > 0, fault
        report(fault, tries, text if fault == next(iter(rows)) else "")


def outcomes(folder: Path, tests: list[str], is_run: bool) -> dict[str, str]:
    """Run the tests. Return {file::test[parameters]: a failure, a reason for skipping, or ""}; {} if only collected."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    junit = REPORTS / f"tests_{folder.name}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
        "-o",
    ]
    command += [
        "junit_family=xunit1",
        *([] if is_run else ["--collect-only"]),
        *(f"tests/{test}" for test in tests),
    ]
    environment = plain_environment({"PYTHONDONTWRITEBYTECODE": "1"})
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=6000,
    )
    assert done.returncode in ((0, 1) if is_run else (0,)), (
        done.stdout[-5000:] + done.stderr[-2000:]
    )
    if not is_run:
        return {}
    found = {}
    for case in ET.parse(junit).iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        words = [f"{child.tag}: {child.get('message', '')}" for child in problems]
        # which tells the place
        words += [(child.text or "")[-2000:] for child in problems if child.tag != "skipped"]
        file = case.get("file", "").removeprefix("tests/")
        found[f"{file}::{case.get('name')}"] = "\n".join(words)
    return found


def is_of(name: str, test: str) -> bool:
    """Return whether `name`, file::test[parameters], belongs to `test`, which is a file or file::test."""
    return test in (name, name.partition("[")[0], name.partition("::")[0])
