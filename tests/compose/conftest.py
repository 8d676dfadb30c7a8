"""One cluster for the whole folder: building and starting it is most of the time these tests take."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.compose.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of one prefill and one decode container; taken down at the end, when nothing of it may be left."""
    cluster = Cluster()
    cluster.build()
    try:
        try:
            cluster.up(prefill=1, decode=1)
        except BaseException:
            print(cluster.logs())  # pytest shows it with the error
            raise
        yield cluster
    finally:
        cluster.down()
    assert cluster.left_behind() == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what the containers logged to the report of a test that failed."""
    report = yield
    if report.when == "call" and report.failed and isinstance(item, pytest.Function):
        cluster = item.funcargs.get("cluster")
        if isinstance(cluster, Cluster):
            report.sections.append(("containers", cluster.logs()))
    return report
