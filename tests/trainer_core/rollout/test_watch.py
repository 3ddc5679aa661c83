from trainer_core.rollout.watch import EQUAL_GROUPS, FAILING_GROUPS, FIRST_GROUPS, RewardWatch


def test_broken_from_the_start_is_fatal() -> None:
    watch = RewardWatch()
    verdicts = [watch.observe(failed=True, equal=False, reason="f: KeyError") for _ in range(FIRST_GROUPS)]
    assert verdicts[:-1] == [None] * (FIRST_GROUPS - 1)
    assert verdicts[-1] is not None
    assert verdicts[-1].kind == "fatal"
    assert verdicts[-1].text == "none of the first 4 groups could be scored: f: KeyError"


def test_one_that_works_is_enough_to_go_on_for_long() -> None:
    watch = RewardWatch()
    assert watch.observe(failed=False, equal=False, reason="") is None
    verdicts = [watch.observe(failed=True, equal=False, reason="x") for _ in range(FAILING_GROUPS)]
    assert [verdict for verdict in verdicts if verdict] == [verdicts[-1]]
    assert verdicts[-1] is not None
    assert verdicts[-1].kind == "fatal"


def test_equal_rewards_alarm_again_when_the_row_is_twice_as_long() -> None:
    watch = RewardWatch()

    def alarms(groups: int) -> list[str]:
        told = [watch.observe(failed=False, equal=True, reward=1.0 if i % 4 else 0.0) for i in range(groups)]
        return [verdict.text for verdict in told if verdict is not None and verdict.kind == "alarm"]

    first = alarms(EQUAL_GROUPS)
    assert first == [
        "all rewards were equal within each of the last 32 groups (0.75 on average), so there is nothing to learn from"
    ]
    assert len(alarms(3 * EQUAL_GROUPS)) == 2, "after 64 and 128"
    assert watch.observe(failed=False, equal=False, reason="") is None
    assert not alarms(8 * EQUAL_GROUPS - 1), "a run that has learnt its task has many short rows"
    assert alarms(1)


def test_groups_that_nothing_scores_raise_an_alarm() -> None:
    watch = RewardWatch()
    assert not any(watch.observe(failed=False, equal=False, unscored=True) for _ in range(EQUAL_GROUPS - 1))
    assert watch.observe(failed=False, equal=False) is None, "one that was scored begins the count anew"
    verdicts = [watch.observe(failed=False, equal=False, unscored=True) for _ in range(EQUAL_GROUPS)]
    assert [verdict for verdict in verdicts if verdict] == [verdicts[-1]]
    assert verdicts[-1] is not None
    assert verdicts[-1].kind == "alarm"
    assert verdicts[-1].text == "every reward of the last 32 groups was None, so there is nothing to learn from"
