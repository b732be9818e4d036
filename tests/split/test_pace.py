"""The draft length is the best one by the measured times, for any measurements."""

from __future__ import annotations

import random
from statistics import median

import pytest

from infer.split_client.pace import DraftPace


def test_pace_learns_how_often_drafts_are_right():
    for rate in (0.2, 0.6, 0.9):
        chance, pace = random.Random(0), DraftPace([1, 2, 3, 4, 6, 8])
        for _ in range(2000):
            accepted = next((k for k in range(8) if chance.random() >= rate), 8)
            pace.saw_reply(0.05, 8, accepted, ahead=False)
        truth = sum(rate**k for k in range(5))
        assert pace.committed(4) == pytest.approx(truth, rel=0.35)


@pytest.mark.parametrize("seed", range(8))
def test_pace_choice_is_the_best_by_its_own_estimate(seed):
    chance = random.Random(seed)
    pace = DraftPace(sorted(chance.sample(range(1, 20), chance.randrange(1, 7))))
    for _ in range(chance.randrange(60)):
        drafted = chance.randrange(25)
        pace.saw_draft(chance.expovariate(100), chance.randrange(9))
        accepted = chance.randint(0, drafted)
        pace.saw_reply(chance.expovariate(20), drafted, accepted, chance.random() < 0.5)
        ready = chance.choice([0, 0, 1, 3, 9, 40])
        steps, ahead = pace.choose(ready)
        reply, token = median(pace.reply_s or [0.0]), median(pace.token_s or [0.0])
        speeds = {k: pace.committed(k) / max(reply + k * token, 1e-9) for k in pace.lengths}
        if ahead:
            assert steps == min(ready, pace.lengths[-1])
            speed = pace.committed(steps, ahead=True) / max(reply, 1e-9)
            assert speed >= max(speeds.values())
        else:
            assert steps in pace.lengths and speeds[steps] == max(speeds.values())
