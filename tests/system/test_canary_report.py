"""The report of `make canary`, without its installs and tests."""

from tests import canary

TESTED = dict.fromkeys(canary.NEWEST, ">=1,<2")
SAME = canary.describe_versions(TESTED, dict.fromkeys(canary.NEWEST, "1.5"))
NEWER = canary.describe_versions(TESTED, dict.fromkeys(canary.NEWEST, "1.5") | {"trl": "2.0"})
GOOD = {"passed": 3, "failed": 0, "skipped": 1}
XML = """<testsuites><testsuite><testcase classname="a" name="good"/><testcase classname="a" name="left">
<skipped message="no"/></testcase><testcase classname="b" name="bad"><failure message="moved&#10;more">x</failure>
</testcase></testsuite></testsuites>"""


def test_failures_are_read_with_a_reason_of_one_line() -> None:
    assert canary.read_results(XML) == ({"passed": 1, "failed": 1, "skipped": 1}, [("b::bad", "moved")])


def test_what_broke_is_named_and_ends_in_1() -> None:
    report, code = canary.summarise({"core": (NEWER, GOOD, []), "Unsloth": (SAME, *canary.read_results(XML))})
    assert code == 1 and "BROKE b::bad: moved" in report


def test_a_run_that_skipped_everything_is_no_pass() -> None:
    """The Unsloth tests skip if Unsloth does not import: nothing broke there, and nothing was tested."""
    assert canary.summarise({"Unsloth": (NEWER, {"passed": 0, "failed": 0, "skipped": 9}, [])})[1] == 1


def test_nothing_newer_is_not_sold_as_a_test_of_drift() -> None:
    report, code = canary.summarise({"core": (SAME, GOOD, [])})
    assert code == 0 and "nothing newer" in report
    assert "outside the tested ranges" in canary.summarise({"core": (NEWER, GOOD, []), "Unsloth": (SAME, GOOD, [])})[0]


def test_only_the_newest_are_freed() -> None:
    assert canary.kept(["# x", "trl==1.15.0", "torch==2.13.0", "huggingface_hub==1.33.0"]) == ["torch==2.13.0"]


def test_unsloth_is_tested_with_what_it_allows() -> None:
    """The newest TRL broke 39 of Unsloth's tests, and no user gets the two together: Unsloth caps TRL below it."""
    asked = ["unsloth_zoo>=2026.10.9", "torch<2.15.0,>=2.4.0", "trl!=0.19.0,<=1.15.0", "huggingface_hub>=0.34.0"]
    assert canary.caps([*asked, "peft>=0.18.0; extra == 'huggingface'"]) == asked[2:]
