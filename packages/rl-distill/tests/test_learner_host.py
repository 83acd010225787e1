"""Ranks beneath the learner host."""

from rl_distill.learner_host import rank_reports

SPEAKS = "engine[0] is serving in pid 7; under way: generate.\nits event loop turns\nthread MainThread ..."
SILENT = (
    "rank[1] is serving in pid 8; under way: train.\nIt has not answered since 12:00:00, 4.0 s: code in C holds its "
    "interpreter, or it is stopped, or has no processor."
)


def test_a_rank_that_did_not_answer_is_told_apart():
    reports = rank_reports([SPEAKS, SILENT, "rank[2] ...\nIts stacks are not known: DeadlineError: late"], asked_s=8.0)
    assert [report.name for report in reports] == ["rank[0]", "rank[1]", "rank[2]"]
    assert [report.is_answering for report in reports] == [True, False, False]
    assert [report.since_s for report in reports] == [0.0, 8.0, 8.0]
