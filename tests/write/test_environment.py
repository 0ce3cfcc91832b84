"""What a run was made with is read, not imported; what cannot be read is absent."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import time

import numpy as np
import psutil
import pytest

from sonde.write.environment import describe_machine, git_state, package_versions
from sonde.write.system import SystemSampler
from sonde.write.writer import Writer, WriterOptions


def git(folder, *arguments):
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_the_revision_branch_and_changes_of_a_repository_are_recorded(tmp_path):
    git(tmp_path, "init", "-b", "trunk")
    assert git_state(tmp_path) is None  # no revision yet
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    state = git_state(tmp_path)
    assert len(state["revision"]) == 40
    assert state["branch"] == "trunk"
    assert state["dirty"] is False
    (tmp_path / "train.py").write_text("2")
    assert git_state(tmp_path)["dirty"] is True


def test_outside_a_repository_there_is_no_revision(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None


def test_without_git_or_with_a_slow_one_there_is_no_revision(tmp_path, monkeypatch):
    (tmp_path / "git").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert git_state(tmp_path, timeout_s=0.05) is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_state(tmp_path) is None


def test_versions_are_those_installed():
    assert package_versions()["numpy"] == np.__version__
    assert describe_machine()["python"].startswith("3.")


def test_the_machine_is_sampled(tmp_path):
    sample = SystemSampler(tmp_path).sample(step=7)
    assert sample.step == 7
    assert 0 < sample.values["memory_percent"] <= 100
    assert sample.values["process_rss_mib"] > 1
    assert all(math.isfinite(value) for value in sample.values.values())


def test_a_percentage_of_next_to_no_time_is_absent_and_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", pytest.fail)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sampler = SystemSampler(tmp_path)
    assert "cpu_percent" not in sampler.sample(step=0).values
    now += 0.2
    assert {"cpu_percent", "process_cpu_percent"} <= sampler.sample(step=1).values.keys()
    assert "cpu_percent" not in sampler.sample(step=2).values


def test_a_machine_that_tells_nothing_of_its_processes_is_sampled_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "Process", refuse)
    assert SystemSampler(tmp_path).sample(step=0).values.keys() >= {"memory_percent", "disk_percent"}


def sampled(run):
    connection = sqlite3.connect(f"file:{run / 'catalog.sqlite'}?mode=ro", uri=True)
    names = {name for (name,) in connection.execute("select name from system_metrics")}
    connection.close()
    return names


def test_samples_reach_the_catalog_while_the_run_is_written(run, until):
    writer = Writer(run, WriterOptions(flush_interval_s=0.01, system_interval_s=0.01))
    assert writer.flush(20)
    until(lambda: {"cpu_percent", "memory_percent", "disk_free_gib", "process_rss_mib"} <= sampled(run))
    writer.close("finished", deadline_s=20)
